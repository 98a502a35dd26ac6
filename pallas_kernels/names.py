"""Names of what a rematerialisation policy can keep (`jax.ad_checkpoint.checkpoint_name`)."""

OUTPUT = "attn_out"
LSE = "attn_lse"
INDEX = "sparse_index"
SAVED_NAMES = (OUTPUT, LSE, INDEX)
