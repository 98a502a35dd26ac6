"""Language models in Flax NNX, and their Hugging Face checkpoints.

Names are imported on first use, because configurations need families, rotary frequencies and
config.json without importing JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtraining_jax.models.rope import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling
    from mtraining_jax.models.sharding import parameter_names
    from mtraining_jax.models.spec import ModelSpec
    from mtraining_jax.models.transformer import (
        Transformer,
        abstract_state,
        graph_definition,
        init_model,
        param_shardings,
    )

_HOMES = {
    "LinearScaling": "rope",
    "Llama3Scaling": "rope",
    "LongRopeScaling": "rope",
    "ModelSpec": "spec",
    "Transformer": "transformer",
    "YarnScaling": "rope",
    "abstract_state": "transformer",
    "graph_definition": "transformer",
    "init_model": "transformer",
    "param_shardings": "transformer",
    "parameter_names": "sharding",
}

__all__ = [
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "ModelSpec",
    "Transformer",
    "YarnScaling",
    "abstract_state",
    "graph_definition",
    "init_model",
    "param_shardings",
    "parameter_names",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
