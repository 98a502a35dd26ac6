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
    from mtraining_jax.evaluation.decode.options import GenerateOptions
    from mtraining_jax.evaluation.engine import Engine
    from mtraining_jax.evaluation.generate import generate
    from mtraining_jax.parallel.layout import Layout
    from mtraining_jax.sparsity import (
        AdaSpa,
        BlockTopK,
        Choice,
        Dense,
        ExactRows,
        FixedBudget,
        FlexPrefill,
        MixedRows,
        MoBA,
        Pattern,
        Prism,
        SampledRows,
        Shards,
        VerticalSlash,
        XAttention,
        load_budgets,
    )
    from mtraining_jax.sparsity.documents import Documents

_HOMES = {
    "AdaSpa": "sparsity",
    "BlockTopK": "sparsity",
    "Choice": "sparsity",
    "Dense": "sparsity",
    "Documents": "sparsity.documents",
    "Engine": "evaluation.engine",
    "ExactRows": "sparsity",
    "FixedBudget": "sparsity",
    "FlexPrefill": "sparsity",
    "GenerateOptions": "evaluation.decode.options",
    "Inspection": "attention.inspection",
    "Layout": "parallel.layout",
    "MixedRows": "sparsity",
    "MoBA": "sparsity",
    "Pattern": "sparsity",
    "Prism": "sparsity",
    "SampledRows": "sparsity",
    "Shards": "sparsity",
    "VerticalSlash": "sparsity",
    "XAttention": "sparsity",
    "attention_fn": "attention.flax_modules",
    "generate": "evaluation.generate",
    "inspect": "attention.inspection",
    "load_budgets": "sparsity",
    "sequence_layout": "attention.order",
    "sparse_attention": "attention.api",
    "stripe": "attention.order",
    "unstripe": "attention.order",
}

__all__ = [
    "AdaSpa",
    "BlockTopK",
    "Choice",
    "Dense",
    "Documents",
    "Engine",
    "ExactRows",
    "FixedBudget",
    "FlexPrefill",
    "GenerateOptions",
    "Inspection",
    "Layout",
    "MixedRows",
    "MoBA",
    "Pattern",
    "Prism",
    "SampledRows",
    "Shards",
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
