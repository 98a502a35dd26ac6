"""The built-in patterns, one line each."""

from mtraining_jax.plugins import Registry

PATTERNS = Registry(
    "sparse pattern",
    base="mtraining_jax.sparsity.pattern:Settings",
    built_in={
        "dense": "mtraining_jax.sparsity.dense:Dense",
        "vertical_slash": "mtraining_jax.sparsity.vertical_slash:VerticalSlash",
        "fixed": "mtraining_jax.sparsity.fixed_budget:BudgetFile",
        "xattention": "mtraining_jax.sparsity.xattention:XAttention",
        "sampled_rows": "mtraining_jax.sparsity.sampled_rows:SampledRows",
        "mixed_rows": "mtraining_jax.sparsity.mixed_rows:MixedRows",
        "prism": "mtraining_jax.sparsity.prism:Prism",
        "exact_rows": "mtraining_jax.sparsity.exact_rows:ExactRows",
        "minference": "mtraining_jax.sparsity.minference:MInferenceFile",
        "flex_prefill": "mtraining_jax.sparsity.flex_prefill:FlexPrefill",
        "moba": "mtraining_jax.sparsity.moba:MoBA",
        "block_topk": "mtraining_jax.sparsity.block_topk:BlockTopK",
        "replay": "mtraining_jax.sparsity.replay:ReplaySettings",
    },
)
