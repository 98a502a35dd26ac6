"""Qwen3 (dense): norms on queries and keys, and an independent head width."""

from mtraining_jax.models.families.family import Family
from mtraining_jax.models.parameters import Parameter, vector
from mtraining_jax.models.spec import ModelSpec


class Qwen3(Family):
    """Each query and key head is normalized before it is rotated."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    title = "Qwen3"
    defaults = {**Family.defaults, "head_dim": 128}
    fixed = {**Family.fixed, "use_sliding_window": False, "attention_bias": False}

    def layer(self, spec: ModelSpec) -> dict[str, Parameter]:
        norms = {f"self_attn.{part}_norm.weight": vector(spec.head_dim, 1.0) for part in "qk"}
        return super().layer(spec) | norms
