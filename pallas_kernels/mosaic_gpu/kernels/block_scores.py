"""Hopper kernel for the attention of rows of queries, one number for each block of keys.

It is half of a forward pass: products of queries and keys, and the logarithm of their exponentials'
sum over each block of keys. Rows may be joined from several queries (XAttention's antidiagonals,
arXiv 2503.16428): they are fewer then, and their products longer.

A number is a function of one row and one block alone, computed by the same instructions in the same
order, so it has the same bits however rows are dealt to ranks.
"""

import dataclasses
import functools
from collections.abc import Callable
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
_ROW_SLOTS = 2  # of short rows, in shared memory: the next item's are prefetched


@dataclasses.dataclass(frozen=True)
class BlockScoresConfig:
    """Tuning of the kernel."""

    width: int = 256  # columns of one tile
    stages: int = 4  # parts of columns in flight, and of long rows
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
    # Of short rows two tiles of columns have room in shared memory, beside the rows themselves.
    # These stay there for all tiles, or the L2 cache could not deliver fast enough.
    short = 2 * parts <= stages
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
                kv_head = lax.div(head, group)

                def load_rows(part: Array | int, slot: Array, barrier: Any) -> None:
                    depth = pl.ds(part * DEPTH, DEPTH)
                    source = refs["q"].at[b, head, rows, depth]
                    plgpu.copy_gmem_to_smem(source, smem["q"].at[slot], barrier)

                if short:
                    mine = lax.rem(n, _ROW_SLOTS)
                    pl.when(n >= _ROW_SLOTS)(
                        lambda: plgpu.barrier_wait(bars["rows_free"].at[mine])
                    )
                    for part in range(parts):
                        load_rows(part, mine * parts + part, bars["rows_full"].at[mine])

                def load(i: Array, _: None) -> None:
                    slot = lax.rem(done + i, stages)
                    pl.when(done + i >= stages)(lambda: plgpu.barrier_wait(bars["free"].at[slot]))
                    columns, part = pl.ds(lax.div(i, parts) * width, width), lax.rem(i, parts)
                    source = refs["k"].at[b, kv_head, columns, pl.ds(part * DEPTH, DEPTH)]
                    full = bars["full"].at[slot]
                    plgpu.copy_gmem_to_smem(source, smem["k"].at[slot], full)
                    if not short:
                        load_rows(part, slot, full)

                lax.fori_loop(0, steps, load, None)
                return done + steps

            await_last([bars["free"]], lax.fori_loop(0, count, load_item, jnp.int32(0)), stages)
            if short:
                await_last([bars["rows_free"]], count, _ROW_SLOTS)

        def compute_warpgroup() -> None:
            plgpu.set_max_registers(config.compute_registers, action="increase")
            own_rows = pl.ds(warpgroup * ROWS, ROWS)
            accumulator = plgpu.ACC((ROWS, width), jnp.float32)

            def score_item(n: Array, done: Array) -> Array:
                b, head, row_tile = item(n)
                rows = pl.ds(row_tile * TILE_ROWS + warpgroup * ROWS, ROWS)
                seen = plgpu.load(refs["places"].at[rows], layout=ROW_LAYOUT, optimized=False)
                tiles, whole = refs["tiles"][row_tile], refs["whole"][row_tile]

                def store(
                    j: Array, logits: Array, peak: Array, mask: Callable[..., list[Array]]
                ) -> Array:
                    """Writes the scores of a tile; the peak so far."""
                    of_blocks = [
                        logits[:, n * block_columns : (n + 1) * block_columns]
                        for n in range(blocks)
                    ]
                    for n, x in enumerate(mask(of_blocks, j)):
                        own = fold(jnp.maximum, x).max(axis=1) * log2_scale
                        base = jnp.where(own > -jnp.inf, own, 0.0)
                        terms = jnp.exp2(x * log2_scale - rows_to_tile(base, x))
                        total = fold(jnp.add, terms).sum(axis=1)
                        refs["scores"].at[b, head, j * blocks + n, rows][...] = (
                            base + jnp.log2(total)
                        )
                        peak = jnp.maximum(peak, own)
                    return peak

                def causal(of_blocks: list[Array], j: Array) -> list[Array]:
                    """-inf where a row does not see a column."""
                    masked = []
                    for n, x in enumerate(of_blocks):
                        column = iota(x, 1) + (j * width + n * block_columns)
                        masked.append(jnp.where(column <= rows_to_tile(seen, x), x, -jnp.inf))
                    return masked

                def plain(of_blocks: list[Array], j: Array) -> list[Array]:
                    return of_blocks

                def score(j: Array, peak: Array, mask: Callable[..., list[Array]]) -> Array:
                    return store(j, products(done + j * parts), peak, mask)

                of_item = lax.rem(n, _ROW_SLOTS)

                def overlapped(state: tuple[Array, Array]) -> Array:
                    """Products of a tile while the scores of the one before are made."""

                    # A branch inside would end the overlap: loops before and in the masked tiles.
                    def step(
                        j: Array, state: tuple[Array, Array], mask: Callable[..., list[Array]]
                    ) -> tuple[Array, Array]:
                        def run(acc: Any) -> tuple[Array, Array]:
                            start(acc, of_item, done + j * parts)
                            peak = store(j - 1, *state, mask)
                            return acc[...], peak

                        following = pl.run_scoped(run, accumulator)
                        release(done + j * parts)
                        return following

                    state = lax.fori_loop(
                        1, lax.min(tiles, whole + 1), functools.partial(step, mask=plain), state
                    )
                    logits, peak = lax.fori_loop(
                        lax.max(1, whole + 1), tiles, functools.partial(step, mask=causal), state
                    )
                    return store(tiles - 1, logits, peak, causal)

                def first() -> Array:
                    def run(acc: Any) -> Array:
                        start(acc, of_item, done)
                        return acc[...]

                    logits = pl.run_scoped(run, accumulator)
                    release(done)
                    return logits

                peak = full((ROWS,), -jnp.inf, ROW_LAYOUT)
                if short:
                    plgpu.barrier_wait(bars["rows_full"].at[of_item])
                    peak = lax.cond(
                        tiles > 0,
                        lambda peak: overlapped((first(), peak)),
                        lambda peak: peak,
                        peak,
                    )
                    plgpu.barrier_arrive(bars["rows_free"].at[of_item])
                else:
                    peak = lax.fori_loop(
                        0, lax.min(tiles, whole), functools.partial(score, mask=plain), peak
                    )
                    peak = lax.fori_loop(
                        whole, tiles, functools.partial(score, mask=causal), peak
                    )
                refs["peak"].at[b, head, rows][...] = peak
                return done + tiles * parts

            def start(acc: Any, of_item: Array, first: Array) -> None:
                """Begins the products of all parts of a tile with short rows."""
                for i in range(parts):
                    slot = lax.rem(first + i, stages)
                    plgpu.barrier_wait(bars["full"].at[slot])
                    mine = smem["q"].at[of_item * parts + i, own_rows]
                    plgpu.wgmma(acc, mine, smem["k"].at[slot].T)

            def release(first: Array) -> None:
                """Frees the memory of all parts of a tile."""
                for i in range(parts):
                    plgpu.barrier_arrive(bars["free"].at[lax.rem(first + i, stages)])

            def products(first: Array) -> Array:
                """The products of a tile with long rows; parts are released as they are done."""

                def run(acc: Any) -> Array:
                    def part(i: Array, _: None) -> None:
                        slot = lax.rem(first + i, stages)
                        plgpu.barrier_wait(bars["full"].at[slot])
                        plgpu.wgmma(acc, smem["q"].at[slot, own_rows], smem["k"].at[slot].T)
                        plgpu.wgmma_wait(1)
                        # Only this part is in flight: the memory of the one before is free.
                        before = lax.rem(first + i + stages - 1, stages)
                        pl.when(i > 0)(lambda: plgpu.barrier_arrive(bars["free"].at[before]))

                    lax.fori_loop(0, parts, part, None)
                    return acc[...]

                logits = pl.run_scoped(run, accumulator)
                last = lax.rem(first + parts - 1, stages)
                plgpu.barrier_arrive(bars["free"].at[last])
                return logits

            lax.fori_loop(0, count, score_item, jnp.int32(0))

        pl.when(warpgroup == WARPGROUPS)(memory_warpgroup)
        pl.when(warpgroup < WARPGROUPS)(compute_warpgroup)

    smem = {
        "q": tiled((_ROW_SLOTS * parts if short else stages, TILE_ROWS, DEPTH), q.dtype),
        "k": tiled((stages, width, DEPTH), k.dtype),
    }
    bars = {
        "full": plgpu.Barrier(num_arrivals=1 if short else 2, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    }
    if short:
        bars["rows_full"] = plgpu.Barrier(num_arrivals=parts, num_barriers=_ROW_SLOTS)
        bars["rows_free"] = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=_ROW_SLOTS)
    shape = batch, num_heads, k.shape[2] // block_columns, num_rows
    outputs = [
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct((batch, num_heads, num_rows), jnp.float32),
    ]
    run = launch(block_scores, outputs, [smem, bars], num_blocks, interpret)
    return run(q, k, places, tiles, whole)
