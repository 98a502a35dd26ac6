"""Sparse patterns: selection of the index, and its metrics.

Importing this package loads the patterns but not JAX; functions on arrays are loaded on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mtraining_jax.patterns.adaspa import AdaSpa
from mtraining_jax.patterns.base import ModelSizes, Pattern, Settings
from mtraining_jax.patterns.block_topk import BlockTopK
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.patterns.fixed_budget import FixedBudget, FixedBudgets, load_budgets
from mtraining_jax.patterns.flex_prefill import FlexPrefill
from mtraining_jax.patterns.moba import MoBA
from mtraining_jax.patterns.registry import PATTERNS
from mtraining_jax.patterns.replay import Replay, make_replay
from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from mtraining_jax.patterns.xattention import XAttention
from mtraining_jax.selection.context import Selection, SelectionContext

if TYPE_CHECKING:
    from mtraining_jax.patterns.select import select_index
    from mtraining_jax.selection.metrics import (
        attention_flops,
        attention_recall,
        causal_pairs,
        density,
    )

_HOMES = {
    "attention_flops": "mtraining_jax.selection.metrics",
    "attention_recall": "mtraining_jax.selection.metrics",
    "causal_pairs": "mtraining_jax.selection.metrics",
    "select_index": "mtraining_jax.patterns.select",
    "density": "mtraining_jax.selection.metrics",
}

__all__ = [
    "PATTERNS",
    "AdaSpa",
    "BlockTopK",
    "Selection",
    "Dense",
    "FixedBudget",
    "FixedBudgets",
    "FlexPrefill",
    "MoBA",
    "ModelSizes",
    "Pattern",
    "Replay",
    "SampledRows",
    "Settings",
    "SelectionContext",
    "VerticalSlash",
    "XAttention",
    "attention_flops",
    "attention_recall",
    "causal_pairs",
    "select_index",
    "density",
    "load_budgets",
    "make_replay",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
