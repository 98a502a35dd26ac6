"""Hopper kernels that score key blocks for rows of queries: half of a forward pass.

Rows may be concatenated from several queries (XAttention's antidiagonals, arXiv 2503.16428).
"""

# pyright: reportPrivateImportUsage=false
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.masses import BlockScores, ScoreCall, ScoreTiles
from pallas_kernels.mosaic_gpu.common import LOG2E, ROW_LAYOUT, ROWS, full, launch
from pallas_kernels.mosaic_gpu.device import multiprocessors
from pallas_kernels.mosaic_gpu.kernels.row_products import LongRows, ShortRows
from pallas_kernels.mosaic_gpu.kernels.row_tiles import RowTiles, row_inputs


@dataclasses.dataclass(frozen=True)
class HopperBlockScores(BlockScores):
    interpret: Any = False  # or parameters of Pallas' GPU interpreter

    def tiles(self, length: int) -> ScoreTiles:
        kind = _products_of(length)
        return ScoreTiles(kind.tile_rows, kind.width, multiprocessors(self.interpret))

    def scores(self, call: ScoreCall) -> tuple[Array, Array]:
        q, k, places, starts, scale, block_columns = call
        batch, num_heads, num_rows, length = q.shape
        kind, group = _products_of(length), num_heads // k.shape[1]
        inputs = {"q": q, "k": k} | row_inputs(places, starts, kind.tile_rows, kind.width)
        items = batch * num_heads * (num_rows // kind.tile_rows)
        num_blocks = min(multiprocessors(self.interpret), items)

        def kernel(refs: dict[str, Any]) -> None:
            walk = RowTiles(refs, kind.width, block_columns, scale * LOG2E)
            products = kind(refs, walk, group)
            warpgroup, block = lax.axis_index("wg"), lax.axis_index("block")
            count = lax.div(items - block + num_blocks - 1, num_blocks)

            def memory_warpgroup() -> None:
                plgpu.set_max_registers(kind.memory_registers, action="decrease")

                def load_item(n: Array, done: Array) -> Array:
                    return products.load_item(n, walk.item(block + n * num_blocks), done)

                products.drain(lax.fori_loop(0, count, load_item, jnp.int32(0)))

            def compute_warpgroup() -> None:
                plgpu.set_max_registers(kind.compute_registers, action="increase")

                def score_item(n: Array, done: Array) -> Array:
                    it = walk.item(block + n * num_blocks)
                    rows = pl.ds(it.row_tile * kind.tile_rows + warpgroup * ROWS, ROWS)
                    seen = walk.seen(it, rows)
                    first, tiles = walk.columns(it)
                    products.begin_item()

                    def score(j: Array, peak: Array) -> Array:
                        logits = products.product(warpgroup, products.step(done, j, first))
                        return walk.score(it, j, logits, rows, seen, peak)

                    peak = lax.fori_loop(first, tiles, score, full((ROWS,), -jnp.inf, ROW_LAYOUT))
                    products.end_item()
                    refs["peak"].at[it.batch, it.head, rows][...] = peak
                    return products.step(done, tiles, first)

                lax.fori_loop(0, count, score_item, jnp.int32(0))

            pl.when(warpgroup == kind.warpgroups)(memory_warpgroup)
            pl.when(warpgroup < kind.warpgroups)(compute_warpgroup)

        kernel.__name__ = kind.name
        shape = batch, num_heads, k.shape[2] // block_columns, num_rows
        outputs = {
            "scores": jax.ShapeDtypeStruct(shape, jnp.float32),
            "peak": jax.ShapeDtypeStruct((batch, num_heads, num_rows), jnp.float32),
        }
        resources = kind.memory(length, q.dtype), kind.barriers(), num_blocks, self.interpret
        results = launch(kernel, inputs, outputs, *resources, warpgroups=kind.warpgroups)
        return results["scores"], results["peak"]


def _products_of(length: int) -> type[LongRows]:
    """Returns how products of rows of a length are computed."""
    return ShortRows if length <= ShortRows.most_length else LongRows
