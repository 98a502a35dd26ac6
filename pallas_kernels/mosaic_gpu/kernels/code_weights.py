"""Hopper kernel that scores key blocks for new tokens, by keys in 4 bits."""

# pyright: reportPrivateImportUsage=false
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.key_codes import ROW_UNIT, unpack
from pallas_kernels.masses import LOG2E
from pallas_kernels.mosaic_gpu.common import (
    COLUMN_LAYOUT,
    ROWS,
    TILE,
    columns_to_tile,
    full,
    iota,
    product,
    tiled,
)
from pallas_kernels.mosaic_gpu.device import multiprocessors
from pallas_kernels.mosaic_gpu.kernels.selected_blocks import padded_blocks

_SLOTS = 4  # blocks of codes in shared memory
_PER_MULTIPROCESSOR = 4  # thread blocks
_LOW = 0x0F0F0F0F  # the low 4 bits of each byte
_LEAST_PEAK = -1e30
_PARAMS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=2048
)


@functools.partial(jax.jit, static_argnames="interpret")  # traced once for all layers
def code_weights_kernel(
    rows: Array, largest: Array, codes: Array, seen: Array, interpret: Any = False
) -> tuple[Array, Array]:
    """Implements `block_weights`, for queries in two bytes (`in_two_bytes`).

    Totals are of parts of the blocks, one per thread block, padded with -inf to a multiple of 64.
    Keys are rows of the products, so that few results are computed for nothing, and words become
    operands in registers.
    """
    batch, kv_heads, both, dim = rows.shape
    num_rows, words = both // 2, codes.shape[3]
    num_blocks, interpreted = seen.shape[1], bool(interpret)
    operand = jnp.bfloat16 if interpreted else jnp.int8
    parts = max(_PER_MULTIPROCESSOR * multiprocessors(interpret) // (batch * kv_heads), 1)
    parts = min(parts, num_blocks)
    tile_parts = -(-parts // ROWS) * ROWS
    seen = jnp.broadcast_to(seen, (batch, *seen.shape[1:]))

    def code_weights(
        rows: Any, largest: Any, codes: Any, seen: Any, out: Any, totals: Any, smem: Any, bars: Any
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

        def limits(step: Array) -> tuple[Array, Array]:
            of = first + jnp.minimum(step, count - 1)
            return seen[entry, of, 0], seen[entry, of, 1]

        def tiles(slot: Array) -> tuple[Array, Array]:
            """Products of the two halves of a block's keys with both bytes of the queries."""
            halves = [smem["codes"].at[slot, pl.ds(x, ROWS)] for x in (0, ROWS)]
            words = [plgpu.load(half, layout=plgpu.Layout.WGMMA) for half in halves]
            if interpreted:
                results = []
                for half in words:
                    smem["staging"][...] = unpack(half).astype(operand)
                    plgpu.commit_smem()
                    results.append(product(smem["staging"], smem["rows"].T, (ROWS, both)))
                return tuple(results)
            keys = [_operand(half) for half in words]

            def run(*sums: Any) -> tuple[Array, ...]:
                for held, of in zip(sums, keys, strict=True):
                    plgpu.wgmma(held, of, smem["rows"].T)
                return tuple(held[...] for held in sums)

            return pl.run_scoped(run, *[plgpu.ACC((ROWS, both), jnp.int32)] * 2)

        plgpu.copy_gmem_to_smem(rows.at[entry, head], smem["rows"], bars["rows"])
        for step in range(_SLOTS - 1):
            pl.when(step < count)(lambda step=step: fetch(jnp.int32(step)))
        unit = plgpu.load(largest.at[entry, head], layout=COLUMN_LAYOUT, optimized=False) * ROW_UNIT
        plgpu.barrier_wait(bars["rows"])

        def fill(place: Array, values: Array) -> None:
            totals.at[entry, head, place][...] = values

        def score(step: Array, carry: Any) -> Any:
            (start, stop), highest, sum_of_all = carry
            following = limits(step + 1)  # read early, to hide the latency
            slot = lax.rem(step, _SLOTS)
            plgpu.barrier_wait(bars["codes"].at[slot])
            logits = []
            for begin, tile in zip((0, ROWS), tiles(slot), strict=True):
                tile = (tile[:, :num_rows] * 256 + tile[:, num_rows:]).astype(jnp.float32)
                key = iota(tile, 0) + begin
                tile *= columns_to_tile(unit, tile)
                logits.append(jnp.where((key >= start) & (key < stop), tile, -jnp.inf))
            peak = jnp.maximum(*logits).max(axis=0)
            # All warps have read the codes before that reduction ends.
            pl.when(step + _SLOTS - 1 < count)(lambda: fetch(step + _SLOTS - 1))
            finite = jnp.where(peak > -jnp.inf, peak, 0.0)
            base = columns_to_tile(finite, logits[0])
            terms = jnp.exp2(logits[0] - base) + jnp.exp2(logits[1] - base)
            total = terms.sum(axis=0)
            weight = jnp.where(total > 0.0, finite + jnp.log(total) * LOG2E, -jnp.inf)
            out.at[entry, head, first + step][...] = weight
            new = jnp.maximum(highest, peak)
            sum_of_all = sum_of_all * jnp.exp2(highest - new) + total * jnp.exp2(peak - new)
            return following, new, sum_of_all

        start = (full((num_rows,), x, COLUMN_LAYOUT) for x in (_LEAST_PEAK, 0.0))
        _, highest, total = lax.fori_loop(0, count, score, (limits(jnp.int32(0)), *start))
        of_part = jnp.where(total > 0.0, highest + jnp.log(total) * LOG2E, -jnp.inf)
        fill(part, of_part)
        none = full((num_rows,), -jnp.inf, COLUMN_LAYOUT)
        for begin in range(parts, tile_parts, parts):
            pl.when(begin + part < tile_parts)(lambda begin=begin: fill(begin + part, none))

    smem = {"rows": tiled((both, dim), operand), "codes": tiled((_SLOTS, TILE, words), jnp.int32)}
    if interpreted:
        smem["staging"] = tiled((ROWS, dim), operand)
    bars = {"rows": plgpu.Barrier(), "codes": plgpu.Barrier(num_barriers=_SLOTS)}
    run = plgpu.kernel(
        code_weights,
        out_type=[
            jax.ShapeDtypeStruct((batch, kv_heads, blocks, num_rows), jnp.float32)
            for blocks in (padded_blocks(num_blocks), tile_parts)
        ],
        scratch_types=[smem, bars],
        grid=(batch * kv_heads * parts,),
        grid_names=("block",),
        compiler_params=_PARAMS,
        interpret=interpret,
    )
    return run(rows.astype(operand), largest, codes, seen)


def _operand(words: Array) -> Array:
    """Turns packed codes int32 [64, D / 8] into an operand int8 [64, D]."""
    rows, width = words.shape
    layout = plgpu.Layout.WGMMA_8BIT

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((rows, 8 * width), jnp.int8, layout),
    )
    def widen(_: Any, words: Any) -> Any:
        word, four = (
            ir.IntegerType.get_signless(32),
            ir.VectorType.get((4,), ir.IntegerType.get_signless(8)),
        )
        one_word = ir.VectorType.get((1,), word)
        to = layout.to_mgpu()
        registers = np.empty(to.registers_shape((rows, 8 * width)), object)
        for place, held in np.ndenumerate(words.registers):
            for e, high in np.ndindex(2, 2):
                bits = vector.extract(held, [], [e])
                if high:
                    bits = arith.shrui(bits, arith.constant(word, 4))
                bits = arith.andi(bits, arith.constant(word, _LOW))
                bits = vector.bitcast(four, vector.broadcast(one_word, bits))
                registers[0, 4 * place[1] + 2 * e + high, *place[2:]] = bits
        return mgpu.FragmentedArray(_registers=registers, _layout=to, _is_signed=True)

    return cast(Any, widen)(words)
