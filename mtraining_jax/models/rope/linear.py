"""Position interpolation: divides all frequencies by one factor."""

import dataclasses
from typing import ClassVar

import numpy as np

from mtraining_jax.models.rope.kind import RopeScaling, Scaled


@dataclasses.dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Position interpolation (arXiv:2306.15595): every frequency is divided by `factor`."""

    type: ClassVar[str] = "linear"

    def stretch(self, plain: np.ndarray, theta: float, context: int, length: int) -> Scaled:
        return plain / self.factor, 1.0
