"""Hopper kernel that scores key blocks for one token per sequence, with keys in 4 bits."""

# pyright: reportPrivateImportUsage=false
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.common import (
    COLUMN_LAYOUT,
    LOG2E,
    ROWS,
    TILE,
    columns_to_tile,
    iota,
    tiled,
)
from pallas_kernels.mosaic_gpu.device import multiprocessors
from pallas_kernels.mosaic_gpu.interpreter import with_accumulators

_SLOTS = 4  # blocks of codes in shared memory
_PER_MULTIPROCESSOR = 4  # thread blocks
_HIGH = -16  # the high four bits of a byte
_PARAMS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=2048
)


def code_weights_kernel(
    rows: Array, codes: Array, seen: Array, group: int, interpret: Any = False
) -> Array:
    """Implements `block_weights` for scaled queries [B, Hk, R, D], R a multiple of 8.

    The first `group` rows are the heads of a key/value head, the others zeros.

    One warpgroup per thread block, which reads every block of codes once. Keys are rows of the
    product, so that few results are computed for nothing, and bytes become operands in registers.
    """
    batch, kv_heads, num_rows, dim = rows.shape
    half, num_blocks, interpreted = dim // 2, seen.shape[1], bool(interpret)
    parts = max(_PER_MULTIPROCESSOR * multiprocessors(interpret) // (batch * kv_heads), 1)
    parts = min(parts, num_blocks)
    seen = jnp.broadcast_to(seen, (batch, *seen.shape[1:]))
    shape = ROWS, num_rows

    def code_weights(
        rows_low: Any, rows_high: Any, codes: Any, seen: Any, out: Any, smem: Any, bars: Any
    ) -> None:
        block = lax.axis_index("block")
        pair, part = lax.div(block, parts), lax.rem(block, parts)
        entry, head = lax.div(pair, kv_heads), lax.rem(pair, kv_heads)
        first = lax.div(num_blocks * part, parts)
        count = lax.div(num_blocks * (part + 1), parts) - first

        def fetch(step: Array) -> None:
            slot = lax.rem(step, _SLOTS)
            keys = pl.ds((first + step) * TILE, TILE)
            source = codes.at[entry, head, keys]
            plgpu.copy_gmem_to_smem(source, smem["codes"].at[slot], bars["codes"].at[slot])

        for name, source in (("low", rows_low), ("high", rows_high)):
            plgpu.copy_gmem_to_smem(source.at[entry, head], smem[name], bars["rows"])
        for step in range(_SLOTS - 1):
            pl.when(step < count)(lambda step=step: fetch(jnp.int32(step)))
        plgpu.barrier_wait(bars["rows"])

        def logits(slot: Array, begin: int) -> Array:
            source = smem["codes"].at[slot, pl.ds(begin, ROWS)]
            both = plgpu.load(source, layout=plgpu.Layout.WGMMA_UPCAST_2X, optimized=False)

            def operand(values: Array) -> Array:
                return plgpu.layout_cast(values.astype(rows.dtype), plgpu.Layout.WGMMA)

            low, high = operand(both & 15), operand(both & _HIGH)

            def products(acc: Any) -> Array:
                acc.start(plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA))
                acc.add(low, smem["low"].T)
                acc.add(high, smem["high"].T)
                return acc.value(younger=0)

            staging = smem["staging"] if interpreted else None
            return with_accumulators(products, shape, interpreted=interpreted, staging=staging)

        def score(step: Array, _: None) -> None:
            slot = lax.rem(step, _SLOTS)
            start, stop = (seen[entry, first + step, end] for end in range(2))
            plgpu.barrier_wait(bars["codes"].at[slot])
            tiles = []
            for begin in (0, ROWS):
                tile = logits(slot, begin)
                key = iota(tile, 0) + begin
                tiles.append(jnp.where((key >= start) & (key < stop), tile, -jnp.inf))
            peak = jnp.maximum(*tiles).max(axis=0)
            # All warps have read the codes before that reduction ends.
            pl.when(step + _SLOTS - 1 < count)(lambda: fetch(step + _SLOTS - 1))
            base = columns_to_tile(jnp.where(peak > -jnp.inf, peak, 0.0), tiles[0])
            terms = jnp.exp2(tiles[0] - base) + jnp.exp2(tiles[1] - base)
            total = terms.sum(axis=0)
            member = plgpu.broadcasted_iota(jnp.int32, (num_rows,), 0, layout=COLUMN_LAYOUT)
            some = (total > 0.0) & (member < group)
            weight = jnp.where(some, peak + jnp.log(total) * LOG2E, -jnp.inf)
            out.at[entry, head, first + step][...] = weight

        lax.fori_loop(0, count, score, None)

    smem = {
        "low": tiled((num_rows, half), rows.dtype),
        "high": tiled((num_rows, half), rows.dtype),
        "codes": tiled((_SLOTS, TILE, half), jnp.int8),
    }
    if interpreted:
        smem["staging"] = tiled((ROWS, half), rows.dtype)
    bars = {"rows": plgpu.Barrier(num_arrivals=2), "codes": plgpu.Barrier(num_barriers=_SLOTS)}
    run = plgpu.kernel(
        code_weights,
        out_type=jax.ShapeDtypeStruct((batch, kv_heads, num_blocks, num_rows), jnp.float32),
        scratch_types=[smem, bars],
        grid=(batch * kv_heads * parts,),
        grid_names=("block",),
        compiler_params=_PARAMS,
        interpret=interpret,
    )
    return run(rows[..., :half], rows[..., half:], codes, seen)
