"""The tensors of a Hugging Face checkpoint, and the parameters in each of them."""

from typing import NamedTuple

from mtraining_jax.models.families.family import family_of
from mtraining_jax.models.parameters import LAYERS
from mtraining_jax.models.spec import ModelSpec


class Part(NamedTuple):
    """The part of a tensor that belongs to one parameter, or to one layer or expert of it."""

    parameter: str  # dotted name, e.g. "layers.mlp.up_proj.weight"
    layer: int | None
    first_row: int
    first_column: int = 0
    expert: int | None = None
    # Of a tensor [G, in, out] with all experts: how many parameters alternate in its columns.
    alternating: int = 0

    @property
    def index(self) -> tuple[int, ...]:
        """Where it is in the parameter: the layer and the expert, if it has them."""
        return tuple(x for x in (self.layer, self.expert) if x is not None)


class CheckpointTensor(NamedTuple):
    """One tensor: its name in the checkpoint, its shape, and its parts.

    They are stacked by rows, or alternate.
    """

    name: str
    shape: tuple[int, ...]
    parts: list[Part]


def checkpoint_tensors(spec: ModelSpec) -> list[CheckpointTensor]:
    """All tensors of a checkpoint, in the order in which the model uses them."""
    table = spec.parameters

    def tensor(
        name: str, parameters: tuple[str, ...], layer: int | None, expert: int | None = None
    ) -> CheckpointTensor:
        parts, rows, columns = [], 0, ()
        for parameter in parameters:
            part = Part(parameter, layer, rows, expert=expert)
            parts.append(part)
            height, *columns = table[parameter].shape[len(part.index) :]
            rows += height
        return CheckpointTensor(name, (rows, *columns), parts)

    def alternating(name: str, parameters: tuple[str, ...], layer: int) -> CheckpointTensor:
        count = len(parameters)
        experts, width, *columns = table[parameters[0]].shape[1:]
        parts = [Part(x, layer, 0, i, alternating=count) for i, x in enumerate(parameters)]
        return CheckpointTensor(name, (experts, *columns, count * width), parts)

    family = family_of(spec.family)
    found = [tensor("model.embed_tokens.weight", ("embed_tokens.weight",), None)]
    for layer in range(spec.num_layers):
        for name, parameters in family.layer_tensors(spec).items():
            stacked = tuple(LAYERS + parameter for parameter in parameters)
            is_alternating, name = name in family.alternating, f"model.layers.{layer}.{name}"
            if is_alternating:
                found.append(alternating(name, stacked, layer))
                continue
            for expert in range(spec.num_experts) if "*" in name else (None,):
                found.append(tensor(name.replace("*", str(expert)), stacked, layer, expert))
    found.append(tensor("model.norm.weight", ("norm.weight",), None))
    if "lm_head.weight" in table:
        found.append(tensor("lm_head.weight", ("lm_head.weight",), None))
    return found
