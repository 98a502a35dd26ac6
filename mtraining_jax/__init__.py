"""Train language models with ultra-long contexts in JAX, with dynamic sparse attention.

Public names are imported lazily, so that reading a configuration does not import JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from mtraining_jax.attention.api import sparse_attention as sparse_attention
    from mtraining_jax.attention.flax_modules import attention_fn as attention_fn
    from mtraining_jax.attention.inputs import Residuals as Residuals
    from mtraining_jax.attention.order import sequence_layout as sequence_layout
    from mtraining_jax.attention.order import stripe as stripe
    from mtraining_jax.attention.order import unstripe as unstripe
    from mtraining_jax.attention.placement import Sharding as Sharding
    from mtraining_jax.callbacks import Callback as Callback
    from mtraining_jax.callbacks import Result as Result
    from mtraining_jax.callbacks import Run as Run
    from mtraining_jax.config import Config as Config
    from mtraining_jax.documents import Documents as Documents
    from mtraining_jax.parallel.layout import Layout as Layout
    from mtraining_jax.patterns.adaspa import AdaSpa as AdaSpa
    from mtraining_jax.patterns.base import Pattern as Pattern
    from mtraining_jax.patterns.block_topk import BlockTopK as BlockTopK
    from mtraining_jax.patterns.budgets import FixedBudget as FixedBudget
    from mtraining_jax.patterns.budgets import load_budgets as load_budgets
    from mtraining_jax.patterns.dense import Dense as Dense
    from mtraining_jax.patterns.dense import SlidingWindow as SlidingWindow
    from mtraining_jax.patterns.flex_prefill import FlexPrefill as FlexPrefill
    from mtraining_jax.patterns.moba import MoBA as MoBA
    from mtraining_jax.patterns.sampled_rows import SampledRows as SampledRows
    from mtraining_jax.patterns.vertical_slash import VerticalSlash as VerticalSlash
    from mtraining_jax.patterns.xattention import XAttention as XAttention
    from mtraining_jax.realignment import realign as realign
    from mtraining_jax.selection.context import Selection as Selection
    from mtraining_jax.selection.context import SelectionContext as SelectionContext
    from mtraining_jax.tools.audit.inspection import Inspection as Inspection
    from mtraining_jax.tools.audit.inspection import inspect as inspect
    from mtraining_jax.tools.evaluate.engine.engine import Engine as Engine
    from mtraining_jax.tools.evaluate.engine.engine import generate as generate
    from mtraining_jax.tools.evaluate.engine.options import GenerateOptions as GenerateOptions
    from mtraining_jax.trainer import fit as fit
    from mtraining_jax.utils.fields import options as options

_MODULES = {
    "AdaSpa": "patterns.adaspa",
    "BlockTopK": "patterns.block_topk",
    "Callback": "callbacks",
    "Config": "config",
    "Dense": "patterns.dense",
    "Documents": "documents",
    "Engine": "tools.evaluate.engine.engine",
    "FixedBudget": "patterns.budgets",
    "FlexPrefill": "patterns.flex_prefill",
    "GenerateOptions": "tools.evaluate.engine.options",
    "Inspection": "tools.audit.inspection",
    "Layout": "parallel.layout",
    "MoBA": "patterns.moba",
    "Pattern": "patterns.base",
    "Residuals": "attention.inputs",
    "Result": "callbacks",
    "Run": "callbacks",
    "SampledRows": "patterns.sampled_rows",
    "Selection": "selection.context",
    "SelectionContext": "selection.context",
    "Sharding": "attention.placement",
    "SlidingWindow": "patterns.dense",
    "VerticalSlash": "patterns.vertical_slash",
    "XAttention": "patterns.xattention",
    "attention_fn": "attention.flax_modules",
    "fit": "trainer",
    "generate": "tools.evaluate.engine.engine",
    "inspect": "tools.audit.inspection",
    "load_budgets": "patterns.budgets",
    "options": "utils.fields",
    "realign": "realignment",
    "sequence_layout": "attention.order",
    "sparse_attention": "attention.api",
    "stripe": "attention.order",
    "unstripe": "attention.order",
}
__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module(f"{__name__}.utils.version").VERSION
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, "__version__"})
