"""The interface of a RoPE scaling, and the simplest one."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

import numpy as np

from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import Ge

# Frequencies, float64 [D/2] in radians per token, and the factor on cosines and sines.
Scaled = tuple[np.ndarray, float]


@options
class RopeScaling:
    """Rotary frequencies for contexts longer than those of the original training."""

    type: ClassVar[str]
    needs_original: ClassVar[bool] = False

    factor: Annotated[float, Ge(1)]
    """Ratio of the new to the original context length."""

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
        """Scales frequencies of base `theta`, in models of `context` and sequences of `length`."""
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
        """Builds the scaling from the entries that are set."""
        fields = {x.name: values.get(x.name) for x in dataclasses.fields(cls)}
        fields = {name: value for name, value in fields.items() if value is not None}
        if "factor" not in fields:
            raise ValueError("factor is missing")
        return cls(**fields)

    @classmethod
    def from_hf(cls, rope: Mapping[str, Any], context: int) -> Self:
        """Reads `rope_parameters` of a config.json, or `rope_scaling` of older files."""
        return cls.from_fields(rope)

    def to_hf(self, context: int) -> dict[str, Any]:
        """Returns every field that is set: the inverse of `from_hf`."""
        fields = {"rope_type": self.type, **dataclasses.asdict(self)}
        fields = {name: value for name, value in fields.items() if value is not None}
        return {name: list(x) if isinstance(x, tuple) else x for name, x in fields.items()}


@options
class LinearScaling(RopeScaling):
    """Position interpolation (arXiv:2306.15595): every frequency is divided by `factor`."""

    type: ClassVar[str] = "linear"

    def stretch(self, plain: np.ndarray, theta: float, context: int, length: int) -> Scaled:
        return plain / self.factor, 1.0
