"""A scoreboard of the attention of JAX packages, on one GPU."""
