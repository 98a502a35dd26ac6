"""The tensors of a Hugging Face checkpoint, and the parameters in each of them."""

from typing import NamedTuple

from mtraining_jax.models.families.family import family_of
from mtraining_jax.models.parameters import LAYERS
from mtraining_jax.models.spec import ModelSpec


class Part(NamedTuple):
    """The part of a tensor that belongs to one parameter, or to one layer of a stacked one."""

    parameter: str  # dotted name, e.g. "layers.mlp.up_proj.weight"
    layer: int | None
    first_row: int
    first_column: int = 0


class CheckpointTensor(NamedTuple):
    """One tensor: its name in the checkpoint, its shape, and its parts, stacked by rows."""

    name: str
    shape: tuple[int, ...]
    parts: list[Part]


def checkpoint_tensors(spec: ModelSpec) -> list[CheckpointTensor]:
    """All tensors of a checkpoint, in the order in which the model uses them."""
    table = spec.parameters

    def tensor(name: str, parameters: tuple[str, ...], layer: int | None) -> CheckpointTensor:
        parts, rows, columns = [], 0, ()
        for parameter in parameters:
            parts.append(Part(parameter, layer, rows))
            shape = table[parameter].shape
            height, *columns = shape if layer is None else shape[1:]
            rows += height
        return CheckpointTensor(name, (rows, *columns), parts)

    layer_tensors = family_of(spec.family).layer_tensors(spec)
    found = [tensor("model.embed_tokens.weight", ("embed_tokens.weight",), None)]
    for layer in range(spec.num_layers):
        for name, parameters in layer_tensors.items():
            stacked = tuple(LAYERS + parameter for parameter in parameters)
            found.append(tensor(f"model.layers.{layer}.{name}", stacked, layer))
    found.append(tensor("model.norm.weight", ("norm.weight",), None))
    if "lm_head.weight" in table:
        found.append(tensor("lm_head.weight", ("lm_head.weight",), None))
    return found
