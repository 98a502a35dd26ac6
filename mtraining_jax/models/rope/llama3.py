"""The frequencies of Llama 3.1 and later."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from mtraining_jax.models.rope.kind import RopeScaling, original_problems


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Slow frequencies divided by `factor`, fast ones kept, a blend between.

    Attributes:
        factor: how many times longer the context becomes.
        original_max_position_embeddings: tokens of context before it was stretched.
        low_freq_factor: dimensions that turn less often than this over the original context are
            divided by factor.
        high_freq_factor: dimensions that turn more often than this over the original context are
            kept as they are.
    """

    type: ClassVar[str] = "llama3"

    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    @classmethod
    def problems(cls, values: Any, prefix: str, head_dim: int | None) -> Iterator[str]:
        yield from super().problems(values, prefix, head_dim)
        yield from original_problems(values, prefix, needed=True)
        if not 0 < values.low_freq_factor < values.high_freq_factor:
            yield (
                f"{prefix}low_freq_factor = {values.low_freq_factor} must be positive and less than"
                f" {prefix}high_freq_factor = {values.high_freq_factor}"
            )

    def stretch(
        self, plain: np.ndarray, *, theta: float, context: int, length: int
    ) -> tuple[np.ndarray, float]:
        del theta, context, length
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / width, 0.0, 1.0)
        return plain * kept + plain / self.factor * (1 - kept), 1.0
