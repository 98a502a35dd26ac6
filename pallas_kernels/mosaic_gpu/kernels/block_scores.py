"""Hopper kernel for the attention of rows of queries, one number for each block of keys.

It is half of a forward pass: products of queries and keys, and the logarithm of their exponentials'
sum over each block of keys. Rows may be joined from several queries (XAttention's antidiagonals,
arXiv 2503.16428): they are fewer then, and their products longer.

A number is a function of one row and one block alone, computed by the same instructions in the same
order, so it has the same bits however rows are dealt to ranks.
"""

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
    fold,
    full,
    iota,
    launch,
    rows_to_tile,
    tiled,
)

TILE_ROWS = WARPGROUPS * ROWS
DEPTH = 64  # numbers of a row and a column in one part of their product


@dataclasses.dataclass(frozen=True)
class BlockScoresConfig:
    """Tuning of the kernel."""

    width: int = 256  # columns of one tile
    stages: int = 4  # parts of rows and columns in flight
    compute_registers: int = 232
    memory_registers: int = 40


def block_scores_kernel(
    q: Array, k: Array, places: Array, *, scale: float, block_columns: int,
    config: BlockScoresConfig, num_blocks: int, interpret: Any = False,
) -> tuple[Array, Array]:
    """Runs the kernel.

    Args:
        q: [B, Hq, R, E] bf16 or fp16: rows; R a multiple of `TILE_ROWS`, E one of `DEPTH`.
        k: [B, Hk, C, E]: columns, C a multiple of `config.width`.
        places: int32 [R], the last column that each row sees; -1 for none.
        scale: of the products, positive.
        block_columns: c, columns of one block of keys, a multiple of 8 that divides `config.width`.
        config: tuning.
        num_blocks: persistent thread blocks (multiprocessors of the device).
        interpret: False, or parameters of the Pallas GPU interpreter.

    Returns:
        scores fp32 [B, Hq, C / c, R], base-2 logarithm of the sum of exp(scale q k) over a block's
        columns that a row sees: -inf where it sees none of them, or anything if no row of its tile
        does. peak fp32 [B, Hq, R], the largest product of scale, q, k and log2(e) that a row sees,
        -inf if it sees none.
    """
    batch, num_heads, num_rows, length = q.shape
    group, width, stages = num_heads // k.shape[1], config.width, config.stages
    blocks, parts = width // block_columns, length // DEPTH
    row_tiles = num_rows // TILE_ROWS
    items = batch * num_heads * row_tiles
    num_blocks = min(num_blocks, items)
    log2_scale = scale * LOG2E
    of_tiles = places.reshape(row_tiles, TILE_ROWS)
    tiles = of_tiles.max(axis=1) // width + 1  # that any row of a tile sees
    whole = (of_tiles.min(axis=1) + 1) // width  # that every one sees all of
    names = ["q", "k", "places", "tiles", "whole", "scores", "peak", "smem", "bars"]

    def block_scores(*arguments: Any) -> None:
        refs = dict(zip(names, arguments, strict=True))
        smem, bars = refs["smem"], refs["bars"]
        warpgroup, block = lax.axis_index("wg"), lax.axis_index("block")
        count = lax.div(items - block + num_blocks - 1, num_blocks)

        def item(n: Array) -> tuple[Array, Array, Array]:
            # The last rows see most columns: they come first.
            number = block + n * num_blocks
            pair = lax.rem(number, batch * num_heads)
            row_tile = row_tiles - 1 - lax.div(number, batch * num_heads)
            return lax.div(pair, num_heads), lax.rem(pair, num_heads), row_tile

        def memory_warpgroup() -> None:
            plgpu.set_max_registers(config.memory_registers, action="decrease")

            def load_item(n: Array, done: Array) -> Array:
                b, head, row_tile = item(n)
                rows = pl.ds(row_tile * TILE_ROWS, TILE_ROWS)
                steps = refs["tiles"][row_tile] * parts

                def load(i: Array, _: None) -> None:
                    slot = lax.rem(done + i, stages)
                    pl.when(done + i >= stages)(lambda: plgpu.barrier_wait(bars["free"].at[slot]))
                    columns = pl.ds(lax.div(i, parts) * width, width)
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
                seen = plgpu.load(refs["places"].at[rows], layout=ROW_LAYOUT, optimized=False)
                tiles, whole = refs["tiles"][row_tile], refs["whole"][row_tile]

                def score(j: Array, peak: Array) -> Array:
                    logits = products(done + j * parts)
                    of_blocks = [
                        logits[:, n * block_columns : (n + 1) * block_columns]
                        for n in range(blocks)
                    ]
                    of_blocks = lax.cond(
                        j >= whole, lambda x: causal(x, seen, j), lambda x: x, of_blocks
                    )
                    for n, x in enumerate(of_blocks):
                        own = fold(jnp.maximum, x).max(axis=1) * log2_scale
                        base = jnp.where(own > -jnp.inf, own, 0.0)
                        terms = jnp.exp2(x * log2_scale - rows_to_tile(base, x))
                        total = fold(jnp.add, terms).sum(axis=1)
                        refs["scores"].at[b, head, j * blocks + n, rows][...] = (
                            base + jnp.log2(total)
                        )
                        peak = jnp.maximum(peak, own)
                    return peak

                peak = lax.fori_loop(0, tiles, score, full((ROWS,), -jnp.inf, ROW_LAYOUT))
                refs["peak"].at[b, head, rows][...] = peak
                return done + tiles * parts

            def products(first: Array) -> Array:
                def run(acc: Any) -> Array:
                    def part(i: Array, _: None) -> None:
                        slot = lax.rem(first + i, stages)
                        plgpu.barrier_wait(bars["full"].at[slot])
                        mine = smem["q"].at[slot, pl.ds(warpgroup * ROWS, ROWS)]
                        plgpu.wgmma(acc, mine, smem["k"].at[slot].T)
                        plgpu.wgmma_wait(1)
                        # Only this part is in flight: the memory of the one before is free.
                        before = lax.rem(first + i + stages - 1, stages)
                        pl.when(i > 0)(lambda: plgpu.barrier_arrive(bars["free"].at[before]))

                    lax.fori_loop(0, parts, part, None)
                    return acc[...]

                logits = pl.run_scoped(run, plgpu.ACC((ROWS, width), jnp.float32))
                last = lax.rem(first + parts - 1, stages)
                plgpu.barrier_arrive(bars["free"].at[last])
                return logits

            def causal(of_blocks: list[Array], seen: Array, j: Array) -> list[Array]:
                """-inf where a row does not see a column."""
                masked = []
                for n, x in enumerate(of_blocks):
                    column = iota(x, 1) + (j * width + n * block_columns)
                    masked.append(jnp.where(column <= rows_to_tile(seen, x), x, -jnp.inf))
                return masked

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
    return run(q, k, places, tiles, whole)
