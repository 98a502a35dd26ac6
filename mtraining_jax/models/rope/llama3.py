"""The frequencies of Llama 3.1 and later."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import numpy as np

from mtraining_jax.models.rope.kind import RopeScaling, Scaled
from mtraining_jax.utils.fields import options


@options
class Llama3Scaling(RopeScaling):
    """Divides low frequencies by `factor`, keeps high ones, and interpolates in between."""

    type: ClassVar[str] = "llama3"
    needs_original: ClassVar[bool] = True

    original_max_position_embeddings: int | None = None
    """Original context length in tokens."""
    low_freq_factor: float = 1.0
    """Dimensions with fewer rotations than this over the original context are divided by factor."""
    high_freq_factor: float = 4.0
    """Dimensions with more rotations than this over the original context are kept."""

    def problems(self, head_dim: int | None = None) -> Iterator[str]:
        yield from super().problems(head_dim)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            yield (
                f"low_freq_factor = {self.low_freq_factor} must be positive and less than "
                f"high_freq_factor = {self.high_freq_factor}"
            )

    @classmethod
    def from_hf(cls, rope: Mapping[str, Any], context: int) -> Self:
        """All fields must be there, as in transformers."""
        for name in ("low_freq_factor", "high_freq_factor"):
            if rope.get(name) is None:
                raise ValueError(f"{name} is missing")
        return super().from_hf(rope, context)

    def stretch(self, plain: np.ndarray, theta: float, context: int, length: int) -> Scaled:
        rotations = self.original_max_position_embeddings * plain / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((rotations - self.low_freq_factor) / width, 0.0, 1.0)
        return plain * kept + plain / self.factor * (1 - kept), 1.0
