"""The interface of a way to stretch rotary positions."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import BeforeValidator

# TOML and JSON have lists; a tuple can be hashed.
FloatList = Annotated[
    tuple[float, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)
]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies for contexts longer than the model was trained on.

    Attributes:
        factor: how many times longer the context becomes.
    """

    type: ClassVar[str]

    factor: float

    def __post_init__(self) -> None:
        if found := list(self.problems(self, "", None)):
            raise ValueError("; ".join(found))

    @classmethod
    def problems(cls, values: Any, prefix: str, head_dim: int | None) -> Iterator[str]:
        """What is wrong with values for this kind, in sentences.

        Args:
            values: any object with the fields of this class.
            prefix: put before the name of each field.
            head_dim: width of a head, if that is known.
        """
        del head_dim
        if values.factor < 1:
            yield f"{prefix}factor = {values.factor} must be at least 1"

    def stretch(
        self, plain: np.ndarray, *, theta: float, context: int, length: int
    ) -> tuple[np.ndarray, float]:
        """The stretched frequencies.

        Args:
            plain: float64 [D/2], radians per token.
            theta: their base.
            context: tokens that the model is meant for.
            length: tokens of the sequence at hand.

        Returns:
            Frequencies float64 [D/2], and the factor on cos and sin.
        """
        raise NotImplementedError

    @property
    def switches_at(self) -> int | None:
        """Tokens up to which sequences are stretched in one way, and longer ones in another.

        None: the length of a sequence does not matter.
        """
        return None

    def length_like(self, length: int) -> int:
        """A length that stretches as `length` does, the same for all that stretch alike.

        Programs can then be shared by sequences of many lengths.
        """
        switch = self.switches_at
        if switch is None:
            return 1
        return switch if length <= switch else switch + 1

    @classmethod
    def from_hf(cls, rope: Mapping[str, Any], context: int) -> Self:
        """Reads the rope parameters of a config.json.

        Args:
            rope: `rope_parameters`, or `rope_scaling` of older files.
            context: tokens that the model is meant for.

        Raises:
            ValueError: if `factor` is missing or a value is impossible.
        """
        del context
        names = [field.name for field in dataclasses.fields(cls)]
        values = {name: rope[name] for name in names if rope.get(name) is not None}
        if "factor" not in values:
            raise ValueError("factor is missing")
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

    def to_hf(self, context: int) -> dict[str, Any]:
        """The inverse of `from_hf`: every field that is set."""
        del context
        fields = {"rope_type": self.type}
        for name, value in dataclasses.asdict(self).items():
            if value is not None:
                fields[name] = list(value) if isinstance(value, tuple) else value
        return fields


def original_problems(values: Any, prefix: str, *, needed: bool) -> Iterator[str]:
    """What is wrong with `original_max_position_embeddings`, in sentences."""
    original = values.original_max_position_embeddings
    name = f"{prefix}original_max_position_embeddings"
    if original is None and needed:
        yield f"{name} is missing: tokens of context that the model was trained on"
    if original is not None and original < 1:
        yield f"{name} = {original} must be positive"
