"""Reads and writes Hugging Face checkpoints: config.json and safetensors.

Names are imported on first use, because configurations read config.json without importing JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtraining_jax.models.huggingface.config import check_same_model, read_hf_config
    from mtraining_jax.models.huggingface.read import load_hf
    from mtraining_jax.models.huggingface.write import save_hf

_HOMES = {
    "check_same_model": "config",
    "load_hf": "read",
    "read_hf_config": "config",
    "save_hf": "write",
}

__all__ = ["check_same_model", "load_hf", "read_hf_config", "save_hf"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
