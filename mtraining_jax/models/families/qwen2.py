"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from mtraining_jax.models.families.family import Family
from mtraining_jax.models.parameters import Parameter, vector
from mtraining_jax.models.spec import ModelSpec


class Qwen2(Family):
    """Biases on queries, keys and values."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    title = "Qwen2"
    fixed = {**Family.fixed, "use_sliding_window": False}

    def layer(self, spec: ModelSpec) -> dict[str, Parameter]:
        layer = super().layer(spec)
        for part in ("q_proj", "k_proj", "v_proj"):
            width, _ = layer[f"self_attn.{part}.weight"].shape
            layer[f"self_attn.{part}.bias"] = vector(width, 0.0)
        return layer
