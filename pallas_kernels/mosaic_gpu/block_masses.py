"""Softmax masses of key blocks from the kernel's scores: `backends.BlockScores` on Hopper GPUs."""

import functools
from typing import Any

from jax import Array

from pallas_kernels.checks import Shaped
from pallas_kernels.masses import masses_from_scores, unsupported_by_kernel
from pallas_kernels.mosaic_gpu import device
from pallas_kernels.mosaic_gpu.kernels import block_scores, short_block_scores
from pallas_kernels.mosaic_gpu.kernels.block_scores import DEPTH, BlockScoresConfig
from pallas_kernels.mosaic_gpu.kernels.short_block_scores import ShortBlockScoresConfig

_INTERPRETED_MULTIPROCESSORS = 2


class HopperBlockScores:
    """The Hopper implementation of `pallas_kernels.backends.BlockScores`."""

    def __init__(
        self,
        interpret: Any = False,
        config: BlockScoresConfig | None = None,
        short: ShortBlockScoresConfig | None = None,
    ):
        self._interpret = interpret
        self._config = config or BlockScoresConfig()
        self._short = short or ShortBlockScoresConfig()

    def unsupported(self, q: Shaped, k: Shaped) -> str | None:
        width = min(self._config.width, self._short.width)
        return unsupported_by_kernel(q, k, depth=DEPTH, width=width)

    def block_masses(
        self,
        q: Array,
        k: Array,
        places: Array,
        first_blocks: Array | None = None,
        *,
        scale: float,
        levels: bool = False,
    ) -> Array | tuple[Array, Array]:
        if q.shape[-1] <= short_block_scores.MOST_LENGTH:
            kernel = functools.partial(
                short_block_scores.short_block_scores_kernel, config=self._short
            )
            tile_rows, width = short_block_scores.TILE_ROWS, self._short.width
        else:
            kernel = functools.partial(block_scores.block_scores_kernel, config=self._config)
            tile_rows, width = block_scores.TILE_ROWS, self._config.width

        def score(
            rows: Array, keys: Array, seen: Array, begin: Array | None
        ) -> tuple[Array, Array]:
            return kernel(
                rows,
                keys,
                seen,
                begin,
                scale=scale,
                block_columns=k.shape[3],
                num_blocks=self._multiprocessors(),
                interpret=self._interpret,
            )

        return masses_from_scores(
            score,
            q,
            k,
            places,
            first_blocks,
            scale=scale,
            levels=levels,
            tile_rows=tile_rows,
            width=width,
            programs=self._multiprocessors(),
        )

    def _multiprocessors(self) -> int:
        return _INTERPRETED_MULTIPROCESSORS if self._interpret else device.multiprocessors()
