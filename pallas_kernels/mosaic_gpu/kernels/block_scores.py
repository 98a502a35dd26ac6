"""Hopper kernels that score key blocks for rows of queries: half of a forward pass.

Rows may be concatenated from several queries (XAttention's antidiagonals, arXiv 2503.16428).
"""

# pyright: reportPrivateImportUsage=false
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.masses import BlockScores, ScoreCall, ScoreTiles
from pallas_kernels.mosaic_gpu.common import (
    LOG2E,
    ROW_LAYOUT,
    ROWS,
    fold,
    full,
    launch,
    rows_to_tile,
)
from pallas_kernels.mosaic_gpu.device import multiprocessors
from pallas_kernels.mosaic_gpu.kernels.row_products import LongRows, ShortRows
from pallas_kernels.mosaic_gpu.kernels.row_tiles import Item, RowTiles, row_inputs


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
            row_tiles = batch, num_heads, num_rows // kind.tile_rows
            walk = RowTiles(refs, row_tiles, kind.width, num_blocks)
            products = kind(refs, walk, group)
            warpgroup, count = lax.axis_index("wg"), walk.count()

            def memory_warpgroup() -> None:
                plgpu.set_max_registers(kind.memory_registers, action="decrease")

                def load_item(n: Array, done: Array) -> Array:
                    return products.load_item(n, walk.item(n), done)

                products.drain(lax.fori_loop(0, count, load_item, jnp.int32(0)))

            def compute_warpgroup() -> None:
                plgpu.set_max_registers(kind.compute_registers, action="increase")

                def score_item(n: Array, done: Array) -> Array:
                    it = walk.item(n)
                    rows = pl.ds(it.row_tile * kind.tile_rows + warpgroup * ROWS, ROWS)
                    seen, uncut = walk.seen(it, rows), walk.uncut(it)
                    blocks = _Blocks(rows, seen, uncut, block_columns, scale * LOG2E)
                    first, tiles = walk.columns(it)
                    products.begin_item()

                    def score(j: Array, peak: Array) -> Array:
                        logits = products.product(warpgroup, products.step(done, j, first))
                        return _score(walk, it, j, logits, blocks, peak)

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


class _Blocks(NamedTuple):
    """How 64 rows score key blocks."""

    rows: Any
    seen: list[Array]  # of `RowTiles.seen`
    uncut: tuple[Array, Array]  # of `RowTiles.uncut`
    size: int  # columns of a key block
    log2_scale: float


def _score(
    walk: RowTiles, it: Item, tile: Array, logits: Array, blocks: _Blocks, peak: Array
) -> Array:
    """Writes the scores of 64 rows for the key blocks of a column tile; returns the new peak."""
    rows, seen, uncut, size, log2_scale = blocks
    count = walk.width // size
    block_logits = [logits[:, n * size : (n + 1) * size] for n in range(count)]

    def mask(block_logits: list[Array]) -> list[Array]:
        first = tile * walk.width
        return [walk.mask(first + n * size, x, seen) for n, x in enumerate(block_logits)]

    block_logits = lax.cond(walk.is_cut(uncut, tile), mask, lambda x: x, block_logits)
    for n, x in enumerate(block_logits):
        own = fold(jnp.maximum, x).max(axis=1) * log2_scale
        base = jnp.where(own > -jnp.inf, own, 0.0)
        total = fold(jnp.add, jnp.exp2(x * log2_scale - rows_to_tile(base, x))).sum(axis=1)
        score = walk.refs["scores"].at[it.batch, it.head, tile * count + n, rows]
        score[...] = base + jnp.log2(total)
        peak = jnp.maximum(peak, own)
    return peak


def _products_of(length: int) -> type[LongRows]:
    """Returns how products of rows of a length are computed."""
    return ShortRows if length <= ShortRows.most_length else LongRows
