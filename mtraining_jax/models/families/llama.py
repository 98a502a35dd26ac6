"""Llama 2 and 3, and similar models such as SmolLM2: no biases, no norms on heads."""

from collections.abc import Mapping
from typing import Any

from mtraining_jax.models.families.family import Family, with_defaults


class Llama(Family):
    """No biases, no norms on heads."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    title = "Llama"
    defaults = {**Family.defaults, "max_position_embeddings": 2048}
    fixed = {**Family.fixed, "attention_bias": False, "mlp_bias": False}

    def read_config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """By default there are as many key/value as query heads."""
        heads = raw.get("num_attention_heads")
        return super().read_config(with_defaults(raw, num_key_value_heads=heads))
