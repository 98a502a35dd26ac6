"""Shapes and results of the attention benchmark."""

import dataclasses
from typing import Any

import numpy as np

from benchmarks.kernels.masks import BLOCK, Work, causal_tiles, dense_flops

OWN = "mtraining-jax"  # the kernels of this repository, in the column "kernels"


@dataclasses.dataclass(frozen=True)
class Shape:
    """One problem size; batch 1, bf16."""

    seq_len: int
    heads: int
    kv_heads: int
    dim: int

    def rng(self, mask: str, seed: int) -> np.random.Generator:
        """Draws the mask with this name, the same one for all kernels."""
        return np.random.default_rng([seed, ord(mask), self.seq_len, self.dim])


@dataclasses.dataclass
class Row:
    """A row of the table: times in ms, None where nothing was measured.

    Attributes:
        work: None for dense causal attention, counted as half of S x S.
        temp: bytes of the whole step beyond inputs and outputs, from the compiler.
    """

    shape: Shape
    mask: str
    who: str
    work: Work | None = None
    select: float | None = None
    build: float | None = None
    forward: float | None = None
    backward: float | None = None
    total: float | None = None
    temp: int | None = None

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Row":
        """The row that `dataclasses.asdict` turned into JSON."""
        work = values["work"] and Work(**values["work"])
        return cls(**values | {"shape": Shape(**values["shape"]), "work": work})

    def density(self) -> tuple[float, float]:
        """Executed blocks and columns over the causal blocks."""
        if self.work is None:
            return 1.0, 0.0
        every = causal_tiles(self.shape.heads, self.shape.seq_len)
        return self.work.tiles / every, self.work.bars / BLOCK / every

    def rates(self, which: str) -> tuple[float, float] | None:
        """TFLOP/s of "forward" or "backward": executed, and as if dense."""
        if (ms := getattr(self, which)) is None:
            return None
        passes = 1.0 if which == "forward" else 2.5
        shape = self.shape
        dense = dense_flops(shape.heads, shape.seq_len, shape.dim)
        executed = dense if self.work is None else self.work.flops(shape.dim)
        return passes * executed / ms / 1e9, passes * dense / ms / 1e9
