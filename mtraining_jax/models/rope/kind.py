"""The interface of a RoPE scaling."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import BeforeValidator

from mtraining_jax.utils.limits import Ge

# TOML and JSON have lists, but tuples are hashable.
FloatList = Annotated[
    tuple[float, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)
]
# Frequencies, float64 [D/2] in radians per token, and the factor on cosines and sines.
Scaled = tuple[np.ndarray, float]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies for contexts longer than those of the original training.

    Attributes:
        factor: ratio of the new to the original context length.
    """

    type: ClassVar[str]
    needs_original: ClassVar[bool] = False

    factor: Annotated[float, Ge(1)]

    def __post_init__(self) -> None:
        if problems := list(self.problems()):
            raise ValueError("; ".join(problems))

    def problems(self, head_dim: int | None = None) -> Iterator[str]:
        """Yields messages, which begin with the field; `head_dim` if the model is known."""
        if self.factor < 1:
            yield f"factor = {self.factor} must be at least 1"
        name = "original_max_position_embeddings"
        original = getattr(self, name, None)
        if original is None and self.needs_original:
            yield f"{name} is missing; it is the context length of the original training, in tokens"
        if original is not None and original < 1:
            yield f"{name} = {original} must be positive"

    def stretch(self, plain: np.ndarray, theta: float, context: int, length: int) -> Scaled:
        """Scales the frequencies `plain` of base `theta`.

        Some scalings depend on `context`, that of the model, or on `length`, that of the sequence.
        """
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
    def from_fields(cls, values: Mapping[str, Any]) -> Self:
        """Builds the scaling from the entries that are set; lists become tuples."""
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            value = values.get(field.name)
            if value is not None:
                fields[field.name] = tuple(value) if isinstance(value, list) else value
        if "factor" not in fields:
            raise ValueError("factor is missing")
        return cls(**fields)

    @classmethod
    def from_hf(cls, rope: Mapping[str, Any], context: int) -> Self:
        """Reads `rope_parameters` of a config.json, or `rope_scaling` of older files."""
        return cls.from_fields(rope)

    def to_hf(self, context: int) -> dict[str, Any]:
        """Returns every field that is set: the inverse of `from_hf`."""
        fields: dict[str, Any] = {"rope_type": self.type}
        for name, value in dataclasses.asdict(self).items():
            if value is not None:
                fields[name] = list(value) if isinstance(value, tuple) else value
        return fields
