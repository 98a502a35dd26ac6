"""Hopper backward kernel for dq, over the forward's lists; runs where the fused one does not."""

# pyright: reportPrivateImportUsage=false
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.interface import BackwardCall
from pallas_kernels.mosaic_gpu.common import (
    LOG2E,
    ROWS,
    TILE,
    WARPGROUPS,
    BackwardOperands,
    Config,
    block_of,
    full,
    gathered_columns,
    launch,
    load_rows,
    rows_to_tile,
    store_rows,
    tiled,
)
from pallas_kernels.mosaic_gpu.interpreter import add_product, with_accumulators
from pallas_kernels.mosaic_gpu.key_stream import Producer, stream_barriers, stream_memory
from pallas_kernels.mosaic_gpu.query_walk import QueryWalk, work_operands
from pallas_kernels.mosaic_gpu.work_queue import (
    WorkQueue,
    queue_barriers,
    queue_memory,
    queue_operands,
)

_KEYS = 64  # keys per product: two accumulators of a whole tile would not fit


def dq_kernel(
    call: BackwardCall, operands: BackwardOperands, config: Config, num_blocks: int, interpret: Any
) -> Array:
    """Runs the kernel: dS = P * (dP - delta), dq [B, nq, Hq, D] = scale * dS K."""
    work, columns, scale = call.plan.work.queries, gathered_columns(call), call.scale
    q = operands.q
    head_dim, dtype, out_dtype = q.shape[-1], q.dtype, call.dq_dtype
    parts, wide = TILE // config.keys, config.keys == _KEYS
    num_items = work.items.shape[0]
    num_blocks = min(num_blocks, num_items)
    interpreted = bool(interpret)
    drawn = work.listed and not (
        call.overlaps_collectives or interpreted
    )  # as in the forward kernel
    log2_scale = scale * LOG2E

    def attention_dq(refs):
        smem, bars = refs["smem"], refs["bars"]
        walk = QueryWalk(refs, work)
        warpgroup = lax.axis_index("wg")
        queue = WorkQueue(refs, num_items, num_blocks)

        def memory_warpgroup():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            producer = Producer(walk, smem, bars, lag=False)

            def load_item(carry):
                n, number, step = carry
                it = walk.item(number)

                @pl.when(n >= 1)
                def _():
                    plgpu.barrier_wait(bars["q_free"])

                queue.draw_after(n)
                rows = pl.ds(it.block * TILE, TILE)
                for name in ("q", "dout"):
                    plgpu.copy_gmem_to_smem(
                        refs[name].at[it.batch, rows, it.head],
                        smem[name].at[0],
                        bars[f"{name}_full"],
                    )
                step = producer.load_item(it, step)
                return n + 1, queue.after(n, bars["q_full"]), step

            queue.draw_first()
            state = jnp.int32(0), queue.first(), jnp.int32(0)
            n, _, steps = lax.while_loop(lambda x: x[1] < num_items, load_item, state)
            producer.drain(steps)
            pl.when(n > 0)(lambda: plgpu.barrier_wait(bars["q_free"]))

        def compute_warpgroup():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            own = pl.ds(warpgroup * ROWS, ROWS)
            slots = {name: smem[name].shape[0] for name in ("k", "v")}
            q_tile, dout_tile = smem["q"].at[0, own], smem["dout"].at[0, own]

            def compute_item(carry):
                n, number, step = carry
                it = walk.item(number)
                rows = pl.ds(it.block * TILE + warpgroup * ROWS, ROWS)
                shift = load_rows(refs["base"].at[it.batch, it.head, rows]) * log2_scale
                delta = load_rows(refs["delta"].at[it.batch, it.head, rows])
                plgpu.barrier_wait(bars["q_full"])
                plgpu.barrier_wait(bars["dout_full"])
                # With dO in registers it is read from shared memory once, not per tile. There is
                # no room for the queries as well, nor for dO of wider heads. At 64, ptxas 13.5
                # would make each product wait for the one before.
                dout_operand = dout_tile
                if head_dim == 128 and not (interpreted or wide):
                    dout_operand = plgpu.load(dout_tile, layout=plgpu.Layout.WGMMA, optimized=False)

                def release(s):
                    plgpu.barrier_arrive(bars["k_free"].at[lax.rem(step + s, slots["k"])])

                def gradient(first, s, at, mask, prepared, column):
                    keys = pl.ds(first, _KEYS)
                    k_tile, v_tile = (smem[name].at[at[name], keys] for name in ("k", "v"))

                    def body(qk, dov):
                        zero = full((ROWS, _KEYS), 0.0, plgpu.Layout.WGMMA)
                        dov.start(rows_to_tile(-delta, zero))  # not subtracted per element
                        # An index that depends on the step keeps descriptors out of registers.
                        at_rows = lax.min(step + s, 0) if wide else 0, own
                        qk.add(smem["q"].at[at_rows], k_tile.T)
                        if wide:  # fewer values are in flight: they may come later
                            plgpu.barrier_wait(bars["v_full"].at[at["v"]])
                        dov.add(smem["dout"].at[at_rows] if wide else dout_operand, v_tile.T)
                        logits = qk.value(younger=1)
                        if first == 0 and not interpreted:
                            # The products of the previous tile are older than this one.
                            pl.when(s > 0)(lambda: release(s - 1))
                        logits = mask.apply(prepared, logits, column + first)
                        logits = logits * log2_scale + rows_to_tile(shift, zero)
                        # Added after scaling, the column mask is free.
                        bias = mask.bias(smem, at["k"], first, _KEYS)
                        p = jnp.exp2(logits if bias is None else logits + bias)
                        return p * dov.value(younger=0)

                    shapes = 2 * [(ROWS, _KEYS)]
                    return with_accumulators(body, *shapes, interpreted=interpreted).astype(dtype)

                def tile(s, dq, mask, add):
                    at = {name: lax.rem(step + s, count) for name, count in slots.items()}
                    block, column = block_of(s, parts)
                    prepared = mask.prepare(block)
                    plgpu.barrier_wait(bars["k_full"].at[at["k"]])
                    if not wide:
                        plgpu.barrier_wait(bars["v_full"].at[at["v"]])
                    mask.await_bias(bars, at["k"])
                    for first in range(0, config.keys, _KEYS):
                        ds = gradient(first, s, at, mask, prepared, column)
                        if first == config.keys - _KEYS:
                            plgpu.barrier_arrive(bars["v_free"].at[at["v"]])
                        dq = add(dq, ds, smem["k"].at[at["k"], pl.ds(first, _KEYS)])
                    if interpreted:  # waits for each product
                        release(s)
                    return dq

                def in_place(dq_ref, ds, keys):
                    plgpu.wgmma(dq_ref, ds, keys)
                    return dq_ref

                def by_value(dq, ds, keys):
                    staging = smem["ds"].at[warpgroup]
                    return add_product(dq, ds, keys, interpreted=True, staging=staging)

                segments = walk.segments(it, warpgroup)

                def walk_tiles(dq, add):
                    for start, stop, mask in segments:
                        body = functools.partial(tile, mask=mask, add=add)
                        dq = lax.fori_loop(start * parts, stop * parts, body, dq)
                    return dq

                if interpreted:
                    dq = walk_tiles(jnp.zeros((ROWS, head_dim), jnp.float32), by_value)
                else:
                    dq = pl.run_scoped(
                        lambda ref: walk_tiles(ref, in_place)[...],
                        plgpu.ACC((ROWS, head_dim), jnp.float32),
                    )
                    pl.when(it.steps > 0)(lambda: release(it.steps * parts - 1))
                dq = (dq * scale).astype(out_dtype)
                store_rows(dq, refs["dq"].at[it.batch, rows, it.head], q_tile)
                following = queue.after(n)
                plgpu.barrier_arrive(bars["q_free"])
                return n + 1, following, step + it.steps * parts

            state = jnp.int32(0), queue.first(), jnp.int32(0)
            lax.while_loop(lambda x: x[1] < num_items, compute_item, state)

        pl.when(warpgroup == WARPGROUPS)(memory_warpgroup)
        pl.when(warpgroup < WARPGROUPS)(compute_warpgroup)

    smem = {
        "q": tiled((1, WARPGROUPS * ROWS, head_dim), dtype),
        "dout": tiled((1, WARPGROUPS * ROWS, head_dim), dtype),
        **queue_memory(drawn),
        **stream_memory(config, head_dim, dtype, columns is not None),
    }
    if interpreted:
        smem["ds"] = tiled((WARPGROUPS, ROWS, _KEYS), dtype)
    bars = {
        "q_full": plgpu.Barrier(),
        "dout_full": plgpu.Barrier(),
        "q_free": plgpu.Barrier(num_arrivals=WARPGROUPS),
        **queue_barriers(drawn),
        **stream_barriers(config, columns is not None),
    }
    inputs = operands._asdict() | work_operands(work, columns)
    inputs |= queue_operands(drawn, inputs)
    outputs = {"dq": jax.ShapeDtypeStruct(q.shape, out_dtype)}
    return launch(attention_dq, inputs, outputs, smem, bars, num_blocks, interpret)["dq"]
