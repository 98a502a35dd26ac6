"""Language models in Flax NNX, and their Hugging Face checkpoints."""

from mtraining_jax.models.sharding import parameter_names
from mtraining_jax.models.spec import ModelSpec, YarnScaling
from mtraining_jax.models.transformer import Qwen2, abstract_state, init_model, param_shardings

__all__ = [
    "ModelSpec",
    "Qwen2",
    "YarnScaling",
    "abstract_state",
    "init_model",
    "param_shardings",
    "parameter_names",
]
