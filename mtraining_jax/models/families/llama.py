"""Llama 2 and 3, and similar models such as SmolLM2: no biases, no norms on heads."""

from mtraining_jax.models.families.family import Family


class Llama(Family):
    """No biases, no norms on heads."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    title = "Llama"
    defaults = {**Family.defaults, "max_position_embeddings": 2048}
    fixed = {**Family.fixed, "attention_bias": False, "mlp_bias": False}
    same_as = {"num_key_value_heads": "num_attention_heads"}
