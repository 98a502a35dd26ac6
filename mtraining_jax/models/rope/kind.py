"""The interface of a RoPE scaling."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import BeforeValidator

# TOML and JSON have lists, but tuples are hashable.
FloatList = Annotated[
    tuple[float, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)
]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies for contexts longer than those of the original training.

    Attributes:
        factor: ratio of the new to the original context length.
    """

    type: ClassVar[str]

    factor: float

    def __post_init__(self) -> None:
        if problems := list(self.problems(self, "", None)):
            raise ValueError("; ".join(problems))

    @classmethod
    def problems(cls, values: Any, prefix: str, head_dim: int | None) -> Iterator[str]:
        """Yields messages for invalid values of any object with the fields of this class."""
        del head_dim
        if values.factor < 1:
            yield f"{prefix}factor = {values.factor} must be at least 1"

    def stretch(
        self, plain: np.ndarray, *, theta: float, context: int, length: int
    ) -> tuple[np.ndarray, float]:
        """Scales the frequencies `plain`, float64 [D/2] of base `theta`; see `rope_frequencies`."""
        raise NotImplementedError

    @property
    def switches_at(self) -> int | None:
        """Length in tokens above which sequences are scaled differently; None if there is none."""
        return None

    def length_like(self, length: int) -> int:
        """Returns a length that scales like `length`, so that programs can be shared."""
        switch = self.switches_at
        if switch is None:
            return 1
        return switch if length <= switch else switch + 1

    @classmethod
    def from_hf(cls, rope: Mapping[str, Any], context: int) -> Self:
        """Reads `rope_parameters` of a config.json, or `rope_scaling` of older files."""
        del context
        names = [field.name for field in dataclasses.fields(cls)]
        values = {name: rope[name] for name in names if rope.get(name) is not None}
        if "factor" not in values:
            raise ValueError("factor is missing")
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**fields)

    def to_hf(self, context: int) -> dict[str, Any]:
        """Returns every field that is set: the inverse of `from_hf`."""
        del context
        fields: dict[str, Any] = {"rope_type": self.type}
        for name, value in dataclasses.asdict(self).items():
            if value is not None:
                fields[name] = list(value) if isinstance(value, tuple) else value
        return fields


def original_problems(values: Any, prefix: str, *, needed: bool) -> Iterator[str]:
    """Yields messages for an invalid `original_max_position_embeddings`."""
    original = values.original_max_position_embeddings
    name = f"{prefix}original_max_position_embeddings"
    if original is None and needed:
        yield f"{name} is missing; it is the context length of the original training, in tokens"
    if original is not None and original < 1:
        yield f"{name} = {original} must be positive"
