"""The patterns that come with the package: one line each."""

from mtraining_jax.plugins import Registry

PATTERNS = Registry(
    "sparse pattern",
    base="mtraining_jax.sparsity.pattern:Settings",
    built_in={
        "dense": "mtraining_jax.sparsity.dense:Dense",
        "vertical_slash": "mtraining_jax.sparsity.vertical_slash:VerticalSlash",
        "fixed": "mtraining_jax.sparsity.fixed_budget:BudgetFile",
        "replay": "mtraining_jax.sparsity.replay:ReplaySettings",
    },
)
