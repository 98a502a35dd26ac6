"""Sparse patterns: selection of the index, and its metrics.

Importing this package loads the patterns but not JAX; functions on arrays are loaded on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mtraining_jax.sparsity.adaspa import AdaSpa
from mtraining_jax.sparsity.block_topk import BlockTopK
from mtraining_jax.sparsity.dense import Dense
from mtraining_jax.sparsity.exact_rows import ExactRows
from mtraining_jax.sparsity.fixed_budget import FixedBudget, FixedBudgets, load_budgets
from mtraining_jax.sparsity.flex_prefill import FlexPrefill
from mtraining_jax.sparsity.mixed_rows import MixedRows
from mtraining_jax.sparsity.moba import MoBA
from mtraining_jax.sparsity.pattern import Choice, ModelSizes, Pattern, Settings, Shards
from mtraining_jax.sparsity.prism import Prism
from mtraining_jax.sparsity.registry import PATTERNS
from mtraining_jax.sparsity.replay import Replay, make_replay
from mtraining_jax.sparsity.sampled_rows import SampledRows
from mtraining_jax.sparsity.vertical_slash import VerticalSlash
from mtraining_jax.sparsity.xattention import XAttention

if TYPE_CHECKING:
    from mtraining_jax.sparsity.choose import choose_index
    from mtraining_jax.sparsity.metrics import (
        attention_flops,
        attention_recall,
        causal_pairs,
        density,
    )

_HOMES = {
    "attention_flops": "metrics",
    "attention_recall": "metrics",
    "causal_pairs": "metrics",
    "choose_index": "choose",
    "density": "metrics",
}

__all__ = [
    "PATTERNS",
    "AdaSpa",
    "BlockTopK",
    "Choice",
    "Dense",
    "ExactRows",
    "FixedBudget",
    "FixedBudgets",
    "FlexPrefill",
    "MixedRows",
    "MoBA",
    "ModelSizes",
    "Pattern",
    "Prism",
    "Replay",
    "SampledRows",
    "Settings",
    "Shards",
    "VerticalSlash",
    "XAttention",
    "attention_flops",
    "attention_recall",
    "causal_pairs",
    "choose_index",
    "density",
    "load_budgets",
    "make_replay",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
