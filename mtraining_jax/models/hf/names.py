"""Our parameter names against those of Hugging Face."""

from mtraining_jax.models.spec import ModelSpec

LAYERS = "layers."


def hf_names(name: str, spec: ModelSpec) -> list[str]:
    """The tensors that make up one parameter.

    Args:
        name: ours, e.g. "layers.mlp.up_proj.weight".
        spec: the model.

    Returns:
        One name, or for a stacked parameter one name a layer, in order.
    """
    if name.startswith(LAYERS):
        rest = name.removeprefix(LAYERS)
        return [f"model.layers.{layer}.{rest}" for layer in range(spec.num_layers)]
    return [name if name.startswith("lm_head.") else f"model.{name}"]


def is_redundant(hf_name: str, spec: ModelSpec) -> bool:
    """Whether a tensor may be ignored: rotary tables, and the copy of a tied embedding."""
    tied_copy = spec.tie_word_embeddings and hf_name == "lm_head.weight"
    return tied_copy or hf_name.endswith("rotary_emb.inv_freq")
