"""Softmax masses of key blocks on Hopper GPUs."""

import dataclasses
from typing import Any

from jax import Array

from pallas_kernels.masses import BlockScores, ScoreTiles
from pallas_kernels.mosaic_gpu.device import multiprocessors
from pallas_kernels.mosaic_gpu.kernels.block_scores import block_scores_kernel, products_of


@dataclasses.dataclass(frozen=True)
class HopperBlockScores(BlockScores):
    interpret: Any = False  # or parameters of Pallas' GPU interpreter

    def tiles(self, length: int) -> ScoreTiles:
        kind = products_of(length)
        return ScoreTiles(kind.tile_rows, kind.width, multiprocessors(self.interpret))

    def scores(
        self, q: Array, k: Array, places: Array, starts: Array | None, **options: Any
    ) -> tuple[Array, Array]:
        options |= dict(num_blocks=multiprocessors(self.interpret), interpret=self.interpret)
        return block_scores_kernel(q, k, places, starts, **options)
