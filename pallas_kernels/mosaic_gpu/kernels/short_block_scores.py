"""Hopper kernel that scores key blocks for rows of queries no longer than a head dimension.

Products then take no longer than the exponentials. The kernel uses four compute warpgroups with
tiles of half the width of `block_scores.py`, so that some compute exponentials while others
multiply. Rows stay in shared memory. Scores are bit-identical for any distribution of rows.
"""

# pyright: reportPrivateImportUsage=false
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.common import (
    LOG2E,
    ROW_LAYOUT,
    ROWS,
    await_last,
    full,
    launch,
    tiled,
)
from pallas_kernels.mosaic_gpu.kernels.row_tiles import RowTiles

WARPGROUPS = 4  # compute warpgroups
TILE_ROWS = WARPGROUPS * ROWS
MOST_LENGTH = 128  # components of a row


@dataclasses.dataclass(frozen=True)
class ShortBlockScoresConfig:
    """Tuning of the kernel.

    All warpgroups' registers may not exceed the initial allocation (640 threads of 96); otherwise
    no warpgroup ever gets more.
    """

    width: int = 128  # columns per tile
    stages: int = 4  # tiles of columns in flight
    compute_registers: int = 104
    memory_registers: int = 40


def short_block_scores_kernel(
    q: Array,
    k: Array,
    places: Array,
    starts: Array | None = None,
    *,
    scale: float,
    block_columns: int,
    config: ShortBlockScoresConfig,
    num_blocks: int,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Runs the kernel, as `block_scores_kernel`; E is a multiple of 64, at most `MOST_LENGTH`."""
    batch, num_heads, num_rows, length = q.shape
    group, width, stages = num_heads // k.shape[1], config.width, config.stages
    walk = RowTiles(places, starts, num_heads, batch, TILE_ROWS, width)
    num_blocks = min(num_blocks, walk.items)
    log2_scale = scale * LOG2E
    names = ["q", "k", *walk.inputs, "scores", "peak", "smem", "bars"]

    def short_block_scores(*arguments: Any) -> None:
        refs = dict(zip(names, arguments, strict=True))
        smem, bars = refs["smem"], refs["bars"]
        warpgroup, block = lax.axis_index("wg"), lax.axis_index("block")
        count = lax.div(walk.items - block + num_blocks - 1, num_blocks)

        def item(n: Array) -> tuple[Array, Array, Array]:
            return walk.item(refs, block + n * num_blocks)

        def memory_warpgroup() -> None:
            plgpu.set_max_registers(config.memory_registers, action="decrease")

            def load_item(n: Array, done: Array) -> Array:
                b, head, row_tile = item(n)
                rows = pl.ds(row_tile * TILE_ROWS, TILE_ROWS)
                pl.when(n > 0)(lambda: plgpu.barrier_wait(bars["rows_free"]))
                plgpu.copy_gmem_to_smem(refs["q"].at[b, head, rows], smem["q"], bars["rows_full"])
                (first, tiles), kv_head = walk.columns(refs, b, row_tile), lax.div(head, group)

                def load(j: Array, _: None) -> None:
                    step = done + j - first
                    slot = lax.rem(step, stages)
                    pl.when(step >= stages)(lambda: plgpu.barrier_wait(bars["free"].at[slot]))
                    source = refs["k"].at[b, kv_head, pl.ds(j * width, width)]
                    plgpu.copy_gmem_to_smem(source, smem["k"].at[slot], bars["full"].at[slot])

                lax.fori_loop(first, tiles, load, None)
                return done + tiles - first

            done = lax.fori_loop(0, count, load_item, jnp.int32(0))
            await_last([bars["free"]], done, stages)
            plgpu.barrier_wait(bars["rows_free"])

        def compute_warpgroup() -> None:
            plgpu.set_max_registers(config.compute_registers, action="increase")

            def score_item(n: Array, done: Array) -> Array:
                b, head, row_tile = item(n)
                rows = pl.ds(row_tile * TILE_ROWS + warpgroup * ROWS, ROWS)
                seen = walk.seen(refs, b, rows)
                first, tiles = walk.columns(refs, b, row_tile)
                plgpu.barrier_wait(bars["rows_full"])

                def score(j: Array, peak: Array) -> Array:
                    logits = product(lax.rem(done + j - first, stages))
                    return walk.score(
                        refs,
                        b,
                        head,
                        row_tile,
                        j,
                        logits,
                        rows,
                        seen,
                        peak,
                        block_columns=block_columns,
                        log2_scale=log2_scale,
                    )

                peak = lax.fori_loop(first, tiles, score, full((ROWS,), -jnp.inf, ROW_LAYOUT))
                plgpu.barrier_arrive(bars["rows_free"])
                refs["peak"].at[b, head, rows][...] = peak
                return done + tiles - first

            def product(slot: Array) -> Array:
                plgpu.barrier_wait(bars["full"].at[slot])
                mine = smem["q"].at[pl.ds(warpgroup * ROWS, ROWS)]

                def run(acc: Any) -> Array:
                    plgpu.wgmma(acc, mine, smem["k"].at[slot].T)
                    return acc[...]

                logits = pl.run_scoped(run, plgpu.ACC((ROWS, width), jnp.float32))
                plgpu.barrier_arrive(bars["free"].at[slot])
                return logits

            lax.fori_loop(0, count, score_item, jnp.int32(0))

        pl.when(warpgroup == WARPGROUPS)(memory_warpgroup)
        pl.when(warpgroup < WARPGROUPS)(compute_warpgroup)

    smem = {"q": tiled((TILE_ROWS, length), q.dtype), "k": tiled((stages, width, length), k.dtype)}
    bars = {
        "rows_full": plgpu.Barrier(),
        "rows_free": plgpu.Barrier(num_arrivals=WARPGROUPS),
        "full": plgpu.Barrier(num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    }
    shape = batch, num_heads, k.shape[2] // block_columns, num_rows
    outputs = [
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct((batch, num_heads, num_rows), jnp.float32),
    ]
    run = launch(short_block_scores, outputs, [smem, bars], num_blocks, interpret, WARPGROUPS)
    return run(q, k, *walk.inputs.values())
