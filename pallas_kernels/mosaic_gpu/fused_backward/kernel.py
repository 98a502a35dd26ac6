"""Hopper backward kernel for all gradients of diagonals, not of lists; `MosaicGpu` decides when.

A thread block owns 128 keys, keeps their dk and dv in registers and iterates over the queries that
see them. dq is added in global memory in the fixed order of `work.fused_work`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.interface import Gradients
from pallas_kernels.mosaic_gpu.common import (
    LOG2E,
    ROWS,
    TILE,
    WARPGROUPS,
    BackwardOperands,
    GatheredColumns,
    launch,
    store_rows,
    tiled,
)
from pallas_kernels.mosaic_gpu.fused_backward.steps import FusedConfig, FusedSteps
from pallas_kernels.mosaic_gpu.fused_backward.sums import ADDING_WARPS, add_keys, add_queries
from pallas_kernels.mosaic_gpu.fused_backward.walk import FusedWalk
from pallas_kernels.mosaic_gpu.interpreter import key_scratch
from pallas_kernels.mosaic_gpu.query_stream import QueryStream, key_barriers, key_memory
from pallas_kernels.work.fused_work import FusedWork
from pallas_kernels.work.items import KeyItem, read

_ROW_OPERANDS = ("shift", "minus_delta")


def fused_kernel(
    operands: BackwardOperands,
    work: FusedWork,
    columns: GatheredColumns | None,
    scale: float,
    config: FusedConfig,
    key_dtype: jnp.dtype | None,
    interpret: Any,
) -> Gradients:
    """Runs the kernel: dv = P^T dO, dS = P * (dP - delta), dk = scale dS^T Q, dq = scale dS K.

    Results are fp32, but dk and dv have `key_dtype`, if given, where nothing is added to them:
    without columns, and with one query head for each key/value head (or one item for its group).
    """
    q, k, v, dout, base, delta = operands
    head_dim, group = q.shape[-1], q.shape[2] // k.shape[2]
    split = work.heads < group
    queries = 64 * 128 // head_dim  # per step: as many as fit in shared memory and registers
    interpreted = bool(interpret)
    has_columns = columns is not None
    batch, heads, kv_heads = q.shape[0], q.shape[2], k.shape[2]
    # Of this call's keys: XLA shares equal zeros of two calls, and copies them for one of the two.
    zero, k = lax.optimization_barrier((jnp.float32(0), k))
    dq_ref = jax.new_ref(lax.optimization_barrier(lax.empty(q.shape, jnp.float32)))
    none = zero.astype(jnp.int32)
    counters = jax.new_ref(jnp.full((batch, heads, q.shape[1] // queries, 1), none))
    key_shape = (batch, kv_heads, k.shape[1] // ROWS, 1) if split else (1, 1, 1, 1)
    key_counters = jax.new_ref(jnp.full(key_shape, none))

    def attention_backward(refs):
        smem, bars = refs["smem"], refs["bars"]
        warpgroup = lax.axis_index("wg")
        # One item per thread block: the hardware starts them in order as others finish.
        it = read(KeyItem, refs["items"], lax.axis_index("block"))
        kv_head = lax.div(it.head, group)
        walk = FusedWalk(refs, it, work, queries)

        def load():
            stream = QueryStream(refs, smem, bars, _ROW_OPERANDS)

            def load_keys():
                stream.load_keys(it.batch, it.block, kv_head)

            if has_columns:
                pl.when(walk.columns)(lambda: stream.load_keys(it.batch, it.block, it.head, "c"))
                pl.when(walk.blocks)(load_keys)
            else:
                load_keys()

            def visit(head, row_block, turn, step):
                return stream.load_block(it.batch, head, row_block, step)

            stream.drain(walk.row_blocks(visit, jnp.int32(0)))

        def store(number):
            add_queries(walk, dq_ref, counters, smem, bars, number)

        def memory_warpgroup():
            plgpu.set_max_registers(config.memory_registers, action="decrease")

            @plgpu.warp_map
            def _(warp):
                pl.when(warp == 0)(load)
                pl.when((warp >= 1) & (warp <= ADDING_WARPS))(lambda: store(warp - 1))

        def compute_warpgroup():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            steps = FusedSteps(smem, bars, warpgroup, config, scale, interpreted)
            plgpu.barrier_wait(bars["keys_full"])
            dk, dv, end = steps.run(lambda run_step: walk.steps(warpgroup, run_step))
            steps.finish(end)
            steps.drain(end)
            rows = pl.ds(it.block * TILE + warpgroup * ROWS, ROWS)
            gradients = dk * scale, dv
            staging = smem["dq"].at[warpgroup, pl.ds(0, ROWS)]  # drained: no copy reads it now

            def store_columns():
                targets = (refs[name].at[it.batch, rows, it.head] for name in ("dkc", "dvc"))
                add_keys(tuple(targets), gradients, staging, None, it.key_turn, interpreted)

            def own_keys():
                targets = (refs[name].at[it.batch, rows, kv_head] for name in ("dk", "dv"))
                if complete:
                    # The other warpgroup does not read these values.
                    unused = smem["v"].at[pl.ds(warpgroup * ROWS, ROWS)]
                    for target, x in zip(targets, gradients, strict=True):
                        store_rows(x.astype(target.dtype), target, unused)
                    return
                half = it.block * WARPGROUPS + warpgroup
                counter = key_counters.at[it.batch, kv_head, half, pl.ds(0, 1)] if split else None
                add_keys(tuple(targets), gradients, staging, counter, it.key_turn, interpreted)

            if has_columns:
                pl.when(walk.columns)(store_columns)
                pl.when(walk.blocks)(own_keys)
            else:
                own_keys()

        if interpreted:
            pl.when(warpgroup == WARPGROUPS)(load)
            pl.when(warpgroup == WARPGROUPS + 1)(lambda: store(None))
        else:
            pl.when(warpgroup == WARPGROUPS)(memory_warpgroup)
        pl.when(warpgroup < WARPGROUPS)(compute_warpgroup)

    smem = key_memory(config.stages, queries, head_dim, q.dtype, _ROW_OPERANDS)
    if interpreted:
        smem |= key_scratch(queries, head_dim, q.dtype)
    smem |= {
        "ds": tiled((2, TILE, queries), q.dtype),
        "dq": plgpu.SMEM(
            (ADDING_WARPS, queries, head_dim),
            jnp.float32,
            transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),  # pyright: ignore[reportAbstractUsage]
        ),
    }
    bars = key_barriers(config.stages) | {
        "ds_full": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=2),
        "dq_full": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=ADDING_WARPS),
        "dq_free": plgpu.Barrier(num_barriers=ADDING_WARPS),
    }
    inputs = dict(q=q, k=k, v=v, dout=dout, shift=base * (scale * LOG2E), minus_delta=-delta)
    inputs |= work.operands
    complete = not (split or has_columns) and key_dtype is not None
    like = jax.ShapeDtypeStruct(k.shape, key_dtype if complete else jnp.float32)
    outputs = {"dk": like, "dv": like}
    if has_columns:
        inputs |= columns.operands
        like = jax.ShapeDtypeStruct(columns.k.shape, jnp.float32)
        outputs |= {"dkc": like, "dvc": like}
    # Slices of stacked arrays before or after the kernel (for example in a `lax.scan` over layers)
    # must stay outside of it: XLA's fusion of a kernel with slices ("dynamic-slice-fusion", jaxlib
    # 0.11.2) ignores that dq and the counters are written in place, and gives wrong gradients.
    arrays = lax.optimization_barrier(list(inputs.values()))
    # The interpreter has no warps: loading and storing use one warpgroup each.
    results = launch(
        attention_backward,
        dict(zip(inputs, arrays, strict=True)),
        outputs,
        smem,
        bars,
        work.items.shape[0],
        interpret,
        memory_warpgroups=2 if interpreted else 1,
    )
    dq, additions = lax.optimization_barrier((jax.freeze(dq_ref), jax.freeze(counters)))
    stored = jnp.repeat(additions.swapaxes(1, 2) > 0, queries, axis=1)
    dq = jnp.where(stored, dq, 0.0)
    return Gradients(dq, *(results.get(name) for name in ("dk", "dv", "dkc", "dvc")))
