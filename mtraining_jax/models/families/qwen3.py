"""Qwen3 (dense): norms on queries and keys, and an independent head width."""

from collections.abc import Mapping
from typing import Any

from mtraining_jax.models.families.family import Family, with_defaults
from mtraining_jax.models.parameters import Parameter, vector
from mtraining_jax.models.spec import ModelSpec


class Qwen3(Family):
    """Each query and key head is normalized before it is rotated."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    title = "Qwen3"
    fixed = {**Family.fixed, "use_sliding_window": False, "attention_bias": False}

    def layer(self, spec: ModelSpec) -> dict[str, Parameter]:
        norms = {f"self_attn.{part}_norm.weight": vector(spec.head_dim, 1.0) for part in "qk"}
        return super().layer(spec) | norms

    def head_dim(self, raw: Mapping[str, Any], values: Mapping[str, Any]) -> int:
        """128 if config.json omits it."""
        return super().head_dim(with_defaults(raw, head_dim=128), values)
