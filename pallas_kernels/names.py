"""Checkpoint names for rematerialization policies (`jax.ad_checkpoint.checkpoint_name`)."""

OUTPUT = "attn_out"
LSE = "attn_lse"
INDEX = "sparse_index"
SAVED_NAMES = (OUTPUT, LSE, INDEX)
