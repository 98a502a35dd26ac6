"""Hugging Face checkpoints of Qwen2: config.json and safetensors, in and out."""

from mtraining_jax.models.hf.config import check_same_model, read_hf_config
from mtraining_jax.models.hf.read import load_hf
from mtraining_jax.models.hf.write import save_hf

__all__ = ["check_same_model", "load_hf", "read_hf_config", "save_hf"]
