"""Train language models with ultra-long contexts in JAX, with dynamic sparse attention.

Public names are imported lazily, so that reading a configuration does not import JAX.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from mtraining_jax.attention.api import sparse_attention
    from mtraining_jax.attention.flax_modules import attention_fn
    from mtraining_jax.attention.inspection import Inspection, inspect
    from mtraining_jax.attention.order import sequence_layout, stripe, unstripe
    from mtraining_jax.evaluation.engine.engine import Engine, generate
    from mtraining_jax.evaluation.engine.options import GenerateOptions
    from mtraining_jax.parallel.layout import Layout
    from mtraining_jax.patterns.adaspa import AdaSpa
    from mtraining_jax.patterns.base import Pattern
    from mtraining_jax.patterns.block_topk import BlockTopK
    from mtraining_jax.patterns.budgets import FixedBudget, load_budgets
    from mtraining_jax.patterns.dense import Dense
    from mtraining_jax.patterns.flex_prefill import FlexPrefill
    from mtraining_jax.patterns.moba import MoBA
    from mtraining_jax.patterns.sampled_rows import SampledRows
    from mtraining_jax.patterns.vertical_slash import VerticalSlash
    from mtraining_jax.patterns.xattention import XAttention
    from mtraining_jax.selection.context import Selection, SelectionContext
    from mtraining_jax.selection.documents import Documents

_HOMES = {
    "AdaSpa": "patterns.adaspa",
    "BlockTopK": "patterns.block_topk",
    "Selection": "selection.context",
    "Dense": "patterns.dense",
    "Documents": "selection.documents",
    "Engine": "evaluation.engine.engine",
    "FixedBudget": "patterns.budgets",
    "FlexPrefill": "patterns.flex_prefill",
    "GenerateOptions": "evaluation.engine.options",
    "Inspection": "attention.inspection",
    "Layout": "parallel.layout",
    "MoBA": "patterns.moba",
    "Pattern": "patterns.base",
    "SampledRows": "patterns.sampled_rows",
    "SelectionContext": "selection.context",
    "VerticalSlash": "patterns.vertical_slash",
    "XAttention": "patterns.xattention",
    "attention_fn": "attention.flax_modules",
    "generate": "evaluation.engine.engine",
    "inspect": "attention.inspection",
    "load_budgets": "patterns.budgets",
    "sequence_layout": "attention.order",
    "sparse_attention": "attention.api",
    "stripe": "attention.order",
    "unstripe": "attention.order",
}

__all__ = [
    "AdaSpa",
    "BlockTopK",
    "Selection",
    "Dense",
    "Documents",
    "Engine",
    "FixedBudget",
    "FlexPrefill",
    "GenerateOptions",
    "Inspection",
    "Layout",
    "MoBA",
    "Pattern",
    "SampledRows",
    "SelectionContext",
    "VerticalSlash",
    "XAttention",
    "__version__",
    "attention_fn",
    "generate",
    "inspect",
    "load_budgets",
    "sequence_layout",
    "sparse_attention",
    "stripe",
    "unstripe",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def _version() -> str:
    try:
        return importlib.metadata.version("mtraining-jax")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return "unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
