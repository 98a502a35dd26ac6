"""Mistral: a Llama with a sliding window in every layer, if config.json has one."""

from collections.abc import Mapping
from typing import Any

from mtraining_jax.models.families.family import Family


class Mistral(Family):
    """A sliding window in every layer."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    title = "Mistral"
    defaults = {**Family.defaults, "max_position_embeddings": 131072}
    attention = ("sliding_window",)

    def read_config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        return super().read_config({"sliding_window": 4096, "num_key_value_heads": 8, **raw})
