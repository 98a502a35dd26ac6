"""How a sparse index is chosen, what it costs and what it keeps."""

from mtraining_jax.sparsity.budgets import FixedBudgets, load_budgets
from mtraining_jax.sparsity.metrics import (
    attention_flops,
    attention_recall,
    causal_pairs,
    density,
)
from mtraining_jax.sparsity.patterns import Dense, FixedBudget, Pattern, VerticalSlash
from mtraining_jax.sparsity.replay import Replay, make_replay
from mtraining_jax.sparsity.vertical_slash import INDEX_NAME, choose_index

__all__ = [
    "INDEX_NAME",
    "Dense",
    "FixedBudget",
    "FixedBudgets",
    "Pattern",
    "Replay",
    "VerticalSlash",
    "attention_flops",
    "attention_recall",
    "causal_pairs",
    "choose_index",
    "density",
    "load_budgets",
    "make_replay",
]
