"""Ring attention over the GPUs of one or more hosts."""
