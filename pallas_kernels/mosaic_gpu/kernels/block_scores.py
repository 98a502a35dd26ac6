"""Hopper kernel that scores key blocks for rows of queries: half of a forward pass.

Rows may be concatenated from several queries (XAttention's antidiagonals, arXiv 2503.16428). A
score depends on one row and one block only and is computed by the same instructions in the same
order, so it is bit-identical for any distribution of rows over ranks.
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
    WARPGROUPS,
    await_last,
    full,
    launch,
    tiled,
)
from pallas_kernels.mosaic_gpu.kernels.row_tiles import RowTiles

TILE_ROWS = WARPGROUPS * ROWS
DEPTH = 64  # components of a row and a column in one part of their product


@dataclasses.dataclass(frozen=True)
class BlockScoresConfig:
    """Tuning of the kernel."""

    width: int = 256  # columns per tile
    stages: int = 4  # parts of rows and columns in flight
    compute_registers: int = 232
    memory_registers: int = 40


def block_scores_kernel(
    q: Array,
    k: Array,
    places: Array,
    starts: Array | None = None,
    *,
    scale: float,
    block_columns: int,
    config: BlockScoresConfig,
    num_blocks: int,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Runs the kernel for rows q [B, Hq, R, E] and columns k [B, Hk, C, E].

    Args:
        q, k: bf16 or fp16; R a multiple of `TILE_ROWS`, E of `DEPTH`, C of `config.width`.
        places: int32 [B or 1, R], the last column that each row sees; -1 for none.
        starts: int32 [B, R], the first one, at the start of a block; None for 0. With `starts`,
            `places` are [B, R].
        scale: positive scale of the products.
        block_columns: c, columns per key block, a multiple of 8 that divides `config.width`.
        config: tuning.
        num_blocks: persistent thread blocks (multiprocessors of the device).
        interpret: False, or parameters of the Pallas GPU interpreter.

    Returns:
        scores fp32 [B, Hq, C / c, R] and peak fp32 [B, Hq, R], as in `masses.Score`.
    """
    batch, num_heads, num_rows, length = q.shape
    group, width, stages = num_heads // k.shape[1], config.width, config.stages
    parts = length // DEPTH
    walk = RowTiles(places, starts, num_heads, batch, TILE_ROWS, width)
    num_blocks = min(num_blocks, walk.items)
    log2_scale = scale * LOG2E
    names = ["q", "k", *walk.inputs, "scores", "peak", "smem", "bars"]

    def block_scores(*arguments: Any) -> None:
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
                first, tiles = walk.columns(refs, b, row_tile)
                steps = (tiles - first) * parts

                def load(i: Array, _: None) -> None:
                    slot = lax.rem(done + i, stages)
                    pl.when(done + i >= stages)(lambda: plgpu.barrier_wait(bars["free"].at[slot]))
                    columns = pl.ds((first + lax.div(i, parts)) * width, width)
                    depth = pl.ds(lax.rem(i, parts) * DEPTH, DEPTH)
                    kv_head = lax.div(head, group)
                    for name, source in (
                        ("q", refs["q"].at[b, head, rows, depth]),
                        ("k", refs["k"].at[b, kv_head, columns, depth]),
                    ):
                        plgpu.copy_gmem_to_smem(source, smem[name].at[slot], bars["full"].at[slot])

                lax.fori_loop(0, steps, load, None)
                return done + steps

            await_last([bars["free"]], lax.fori_loop(0, count, load_item, jnp.int32(0)), stages)

        def compute_warpgroup() -> None:
            plgpu.set_max_registers(config.compute_registers, action="increase")

            def score_item(n: Array, done: Array) -> Array:
                b, head, row_tile = item(n)
                rows = pl.ds(row_tile * TILE_ROWS + warpgroup * ROWS, ROWS)
                seen = walk.seen(refs, b, rows)
                first, tiles = walk.columns(refs, b, row_tile)

                def score(j: Array, peak: Array) -> Array:
                    logits = products(done + (j - first) * parts)
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
                refs["peak"].at[b, head, rows][...] = peak
                return done + (tiles - first) * parts

            def products(first: Array) -> Array:
                def run(acc: Any) -> Array:
                    def part(i: Array, _: None) -> None:
                        slot = lax.rem(first + i, stages)
                        plgpu.barrier_wait(bars["full"].at[slot])
                        mine = smem["q"].at[slot, pl.ds(warpgroup * ROWS, ROWS)]
                        plgpu.wgmma(acc, mine, smem["k"].at[slot].T)
                        plgpu.wgmma_wait(1)
                        # Only this part is in flight: the memory of the previous one is free.
                        before = lax.rem(first + i + stages - 1, stages)
                        pl.when(i > 0)(lambda: plgpu.barrier_arrive(bars["free"].at[before]))

                    lax.fori_loop(0, parts, part, None)
                    return acc[...]

                logits = pl.run_scoped(run, plgpu.ACC((ROWS, width), jnp.float32))
                last = lax.rem(first + parts - 1, stages)
                plgpu.barrier_arrive(bars["free"].at[last])
                return logits

            lax.fori_loop(0, count, score_item, jnp.int32(0))

        pl.when(warpgroup == WARPGROUPS)(memory_warpgroup)
        pl.when(warpgroup < WARPGROUPS)(compute_warpgroup)

    smem = {
        "q": tiled((stages, TILE_ROWS, DEPTH), q.dtype),
        "k": tiled((stages, width, DEPTH), k.dtype),
    }
    bars = {
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    }
    shape = batch, num_heads, k.shape[2] // block_columns, num_rows
    outputs = [
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct((batch, num_heads, num_rows), jnp.float32),
    ]
    run = launch(block_scores, outputs, [smem, bars], num_blocks, interpret)
    return run(q, k, *walk.inputs.values())
