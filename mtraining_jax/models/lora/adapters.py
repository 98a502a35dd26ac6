"""LoRA adapters (arXiv 2106.09685) as parameters of a model, without JAX.

A projection y = x W^T gets y + s (x A^T) B^T with s = alpha / rank. W is frozen; names are PEFT's.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from mtraining_jax.models.parameters import Parameter, ParamTable

FACTORS = "lora_A", "lora_B"
_WEIGHT = ".weight"


@dataclasses.dataclass(frozen=True)
class LoraSpec:
    """The adapters of a model.

    Attributes:
        rank: rows of A and columns of B.
        targets: last parts of the names of the projections, for example "q_proj".
        dropout: fraction of the inputs of A that are dropped in training.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def is_adapter(name: str) -> bool:
    """Whether a parameter, by dotted name, is a factor of an adapter."""
    return name.endswith(tuple(f".{factor}{_WEIGHT}" for factor in FACTORS))


def projections(table: ParamTable) -> dict[str, str]:
    """The dotted names of a layer's projections, by their last part."""
    others = {"vector", "experts"}  # neither a router nor experts have adapters
    named = {name for name, x in table.items() if others.isdisjoint(x.axes)}
    modules = [x.removesuffix(_WEIGHT) for x in table if x in named and not is_adapter(x)]
    return {module.rpartition(".")[2]: module for module in modules}


def target_problems(table: ParamTable, targets: Sequence[str]) -> Iterator[str]:
    """Yields messages for targets that are not projections of the layer."""
    known = projections(table)
    if not targets:
        yield f"lora.targets is empty; choose from {', '.join(known)}"
    for target in targets:
        if target not in known:
            yield (
                f'lora.targets: "{target}" is not a projection of the model; choose from '
                f"{', '.join(known)}"
            )


def with_adapters(table: ParamTable, lora: LoraSpec) -> ParamTable:
    """Adds the factors of the adapters to the parameters of a layer."""
    known, found = projections(table), dict(table)
    for target in lora.targets:
        weight = table[known[target] + _WEIGHT]
        (rows, columns), (out, into) = weight.shape, weight.axes
        # Kaiming uniform with a = sqrt(5), and 0, as in PEFT.
        a = Parameter((lora.rank, columns), ("rank", into), limit=1 / math.sqrt(columns))
        b = Parameter((rows, lora.rank), (out, "rank"))
        for factor, parameter in zip(FACTORS, (a, b), strict=True):
            found[f"{known[target]}.{factor}{_WEIGHT}"] = parameter
    return found
