"""LongRoPE: a separate divisor for every frequency, found by search."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import numpy as np

from mtraining_jax.models.rope.kind import RopeScaling, Scaled
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import FloatList


@options
class LongRopeScaling(RopeScaling):
    """LongRoPE (arXiv:2402.13753): divides every frequency by its own factor."""

    type: ClassVar[str] = "longrope"
    needs_original: ClassVar[bool] = True

    original_max_position_embeddings: int | None = None
    """Original context length in tokens."""
    attention_factor: float | None = None
    """Scale of cosines and sines; none is sqrt(1 + ln(factor) /
    ln(original_max_position_embeddings))."""
    short_factor: FloatList = ()
    """Divisors for sequences up to the original context, one per pair of dimensions."""
    long_factor: FloatList = ()
    """Divisors for longer sequences, one per pair of dimensions."""

    def problems(self, head_dim: int | None = None) -> Iterator[str]:
        yield from super().problems(head_dim)
        if self.original_max_position_embeddings == 1:
            yield "original_max_position_embeddings = 1 must be at least 2"
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if not factors:
                yield f"{name} is missing: it needs a number per pair of head dimensions"
            elif min(factors) <= 0:
                yield f"{name} has {min(factors)}; all must be positive"
            elif head_dim is not None and len(factors) != head_dim // 2:
                yield (
                    f"{name} has {len(factors)} entries, but a head of {head_dim} has"
                    f" {head_dim // 2} pairs of dimensions"
                )

    def stretch(self, plain: np.ndarray, theta: float, context: int, length: int) -> Scaled:
        original = self.original_max_position_embeddings
        assert original is not None  # see `problems`
        divisors = self.long_factor if length > original else self.short_factor
        scale = self.usual_attention_factor
        if self.attention_factor is not None:
            scale = self.attention_factor
        return plain / np.asarray(divisors, np.float64), scale

    @property
    def usual_attention_factor(self) -> float:
        """The scale of cosines and sines if no other one is given."""
        original = self.original_max_position_embeddings
        assert original is not None  # see `problems`
        return math.sqrt(1 + math.log(self.factor) / math.log(original))

    @property
    def switches_at(self) -> int | None:
        return self.original_max_position_embeddings

    @classmethod
    def from_hf(cls, rope: Mapping[str, Any], context: int) -> Self:
        """A missing `factor` follows from the two context lengths."""
        original = rope.get("original_max_position_embeddings")
        if rope.get("factor") is None and original:
            rope = {**rope, "factor": max(1.0, context / original)}
        found = super().from_hf(rope, context)
        # `to_hf` writes the usual factor for transformers 4.
        if found.attention_factor == found.usual_attention_factor:
            return dataclasses.replace(found, attention_factor=None)
        return found

    def to_hf(self, context: int) -> dict[str, Any]:
        found, original = super().to_hf(context), self.original_max_position_embeddings
        # Without it, transformers 4 derives it from the two contexts.
        if original is not None and self.factor != max(1.0, context / original):
            found.setdefault("attention_factor", self.usual_attention_factor)
        return found
