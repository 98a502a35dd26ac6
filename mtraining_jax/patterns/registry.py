"""The built-in patterns, one line each."""

from mtraining_jax.utils.plugins import Registry

PATTERNS = Registry(
    "sparse pattern",
    base="mtraining_jax.patterns.base:Settings",
    built_in={
        "dense": "mtraining_jax.patterns.dense:Dense",
        "vertical_slash": "mtraining_jax.patterns.vertical_slash:VerticalSlash",
        "fixed": "mtraining_jax.patterns.fixed_budget:BudgetFile",
        "xattention": "mtraining_jax.patterns.xattention:XAttention",
        "sampled_rows": "mtraining_jax.patterns.sampled_rows:SampledRows",
        "minference": "mtraining_jax.patterns.minference:MInferenceFile",
        "flex_prefill": "mtraining_jax.patterns.flex_prefill:FlexPrefill",
        "moba": "mtraining_jax.patterns.moba:MoBA",
        "block_topk": "mtraining_jax.patterns.block_topk:BlockTopK",
        "replay": "mtraining_jax.patterns.replay:ReplaySettings",
    },
)
