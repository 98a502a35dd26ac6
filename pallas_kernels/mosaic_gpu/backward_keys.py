"""Hopper backward kernel for keys and values: dk and dv of blocks and of gathered columns.

A thread block owns 128 keys, 64 for each compute warpgroup, and walks the query blocks that
see them, for every query head of the group in turn, 64 queries a step. The gradients of its
keys stay in registers from the first query to the last, so nothing is added in global memory
and the sum has one order.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.common import (
    COLUMN_LAYOUT,
    COLUMN_NAMES,
    LOG2E,
    ROW_LAYOUT,
    ROWS,
    TILE,
    WARPGROUPS,
    WORD,
    GatheredColumns,
    iota,
    keep_bias,
    launch,
    product,
    product_plus,
    rows_to_tile,
)
from pallas_kernels.mosaic_gpu.query_stream import QueryStream, key_barriers, key_memory
from pallas_kernels.mosaic_gpu.schedule import (
    FIRST_ROW,
    FULL_ROW,
    KEY_BATCH,
    KEY_BLOCK,
    KEY_COLUMNS,
    KEY_HEAD,
    KIND,
    KeyWorkList,
)

_STEP = 64  # queries of one step
_STEPS = TILE // _STEP
_ROW_OPERANDS = ("base", "minus_delta")


@dataclasses.dataclass(frozen=True)
class KeysConfig:
    """Tuning of the kernel for dk and dv."""

    stages: int = 3  # steps of queries in flight
    deferred: bool = True  # a step's last products run under the next step's first ones
    compute_registers: int = 240
    memory_registers: int = 24


class _KeyItem:
    """One item of a key work list, read from global memory."""

    def __init__(self, items: Any, n: Array):
        self.columns = items[n, KIND] == KEY_COLUMNS
        self.batch = items[n, KEY_BATCH]
        self.head = items[n, KEY_HEAD]
        self.block = items[n, KEY_BLOCK]
        self.first_row = items[n, FIRST_ROW]
        self.full_row = items[n, FULL_ROW]


def backward_keys_kernel(
    q: Array, k: Array, v: Array, dout: Array, base: Array, minus_delta: Array, work: KeyWorkList,
    columns: GatheredColumns | None, *, scale: float, config: KeysConfig, interpret: Any = False,
    one_array: bool = False,
) -> tuple[Array | tuple[Array, Array], Array | tuple[Array, Array] | None]:
    """Runs the kernel: dv = P^T dO, dk = scale * dS^T Q with dS = P * (dP - delta).

    Args:
        q, dout: [B, nq, Hq, D] bf16 or fp16, D 64 or 128, nq a multiple of 128.
        k, v: [B, nk, Hk, D].
        base: fp32 [B, Hq, nq], -lse / scale of the rows' final lse; -inf for empty rows.
        minus_delta: fp32 [B, Hq, nq].
        work: from `key_work`.
        columns: the columns that `work` refers to.
        scale: of the logits.
        config: tuning.
        interpret: False, or parameters of the Pallas GPU interpreter.
        one_array: whether dk and dv come as an array [2, ...] instead of two.

    Returns:
        fp32 dk, dv [B, nk, Hk, D], summed over the query heads of a group, and dk, dv of the
        columns [B, Mv, Hq, D] (None without columns).
    """
    head_dim, group = q.shape[-1], q.shape[2] // k.shape[2]
    dtype = q.dtype
    stages = config.stages
    num_items = work.items.shape[0]
    num_query_blocks = q.shape[1] // TILE
    interpreted = bool(interpret)
    has_columns = columns is not None
    log2_scale = scale * LOG2E
    names = ["q", "k", "v", "dout", *_ROW_OPERANDS]
    names += ["items", "lists", "first", "last", "diagonal"]
    names += COLUMN_NAMES if has_columns else []
    suffixes = ("", "c") if has_columns else ("",)
    gradients = ("dkv",) if one_array else ("dk", "dv")
    names += [name + suffix for suffix in suffixes for name in gradients] + ["smem", "bars"]

    def attention_dkdv(*arguments):
        refs = dict(zip(names, arguments, strict=True))
        if one_array:
            for suffix in suffixes:
                pair = refs["dkv" + suffix]
                refs |= {"dk" + suffix: pair.at[0], "dv" + suffix: pair.at[1]}
        smem, bars = refs["smem"], refs["bars"]
        warpgroup = lax.axis_index("wg")
        own = pl.ds(warpgroup * ROWS, ROWS)

        # One item a thread block: items differ so much in length that the hardware's own
        # scheduling, longest first, balances better than any fixed share.
        it = _KeyItem(refs["items"], lax.axis_index("block"))

        def query_block(head, s):
            if work.listed:
                return refs["lists"][it.batch, head, it.block, s]
            return it.block + refs["lists"][it.batch, head, s]

        def over_heads(visit, carry):
            """Calls visit(head, first, last, carry) for the heads that see a key block."""

            def member(m, carry):
                head = it.head * group + m
                first = refs["first"][it.batch, head, it.block]
                last = refs["last"][it.batch, head, it.block]
                return visit(head, first, last, carry)

            return lax.fori_loop(0, group, member, carry)

        def memory_warpgroup():
            plgpu.set_max_registers(config.memory_registers, action="decrease")

            stream = QueryStream(
                refs, smem, bars, stages=stages, queries=_STEP, rows=_ROW_OPERANDS
            )

            def load_block():
                stream.load_keys(it.batch, it.block, it.head)

                def visit(head, first, last, step):
                    def entry(s, carry):
                        number, step = carry
                        following = query_block(head, lax.min(s + 1, last - 1))
                        return following, stream.load_block(it.batch, head, number, step)

                    start = lax.cond(
                        last > first, lambda: query_block(head, first), lambda: jnp.int32(0)
                    )
                    return lax.fori_loop(first, last, entry, (start, step))[1]

                return over_heads(visit, jnp.int32(0))

            def load_columns():
                stream.load_keys(it.batch, it.block, it.head, "c")

                # From the last query block back: all tiles of a head's columns start together
                # there and read the same queries, which the L2 cache then serves.
                def entry(n, step):
                    row_block = num_query_blocks - 1 - n
                    return stream.load_block(it.batch, it.head, row_block, step)

                return lax.fori_loop(0, num_query_blocks - it.first_row, entry, jnp.int32(0))

            steps = lax.cond(it.columns, load_columns, load_block) if has_columns else load_block()
            stream.drain(steps)

        def compute_warpgroup():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            k_tile, v_tile = smem["k"].at[own], smem["v"].at[own]

            def release(step):
                @pl.when(step >= 0)
                def _():
                    plgpu.barrier_arrive(bars["free"].at[lax.rem(step, stages)])

            def query_step(step, mask, accumulate):
                """Adds the gradients from 64 queries.

                `mask` takes logits and returns them masked, with an additive mask by key or
                None: added after scaling, it costs nothing.
                """
                slot = lax.rem(step, stages)
                q_tile, dout_tile = smem["q"].at[slot], smem["dout"].at[slot]
                plgpu.barrier_wait(bars["full"].at[slot])
                shape = (ROWS, _STEP)

                def columns(name):
                    values = plgpu.load(smem[name].at[slot], layout=COLUMN_LAYOUT)
                    return lax.broadcast_in_dim(values, shape, [1])

                # The accumulators start from -lse / scale and -delta, which the columns would
                # otherwise subtract element by element.
                logits = product_plus(
                    lambda: columns("base"), k_tile, q_tile.T, shape, interpreted
                )
                if config.deferred:
                    # The products of the step before are older than this one's.
                    release(step - 1)
                logits, bias = mask(logits)
                logits = logits * log2_scale
                p = jnp.exp2(logits if bias is None else logits + rows_to_tile(bias, logits))
                accumulate("dv", p.astype(dtype), dout_tile)
                dp = product_plus(
                    lambda: columns("minus_delta"), v_tile, dout_tile.T, shape, interpreted
                )
                accumulate("dk", (p * dp).astype(dtype), q_tile)
                if not config.deferred:
                    if not interpreted:
                        plgpu.wgmma_wait(0)
                    release(step)

            def walk_block(accumulate):
                def visit(head, first, last, step):
                    def entry(s, step):
                        offset = query_block(head, s) - it.block
                        shift = jnp.where(offset == refs["diagonal"][0], 0, TILE)
                        for part in range(_STEPS):
                            # Only a list's first entry can be the diagonal, but a branch would
                            # double the code; the comparison is hidden by the products.
                            def mask(logits, part=part):
                                key = iota(logits, 0) + warpgroup * ROWS
                                query = iota(logits, 1) + (part * _STEP + shift)
                                return jnp.where(query >= key, logits, -jnp.inf), None

                            query_step(step + part, mask, accumulate)
                        return step + _STEPS

                    def plain(s, step):
                        for part in range(_STEPS):
                            query_step(
                                step + part, lambda logits: (logits, None), accumulate
                            )
                        return step + _STEPS

                    one = lax.min(first + 1, last)
                    step = lax.fori_loop(first, one, entry, step)
                    return lax.fori_loop(one, last, plain, step)

                return over_heads(visit, jnp.int32(0))

            def walk_columns(accumulate):
                tokens = plgpu.load(
                    refs["tokens"].at[
                        it.batch, it.head, pl.ds(it.block * TILE + warpgroup * ROWS, ROWS)
                    ],
                    layout=ROW_LAYOUT, optimized=False,
                )
                index = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW_LAYOUT)
                first_word = it.block * (TILE // WORD) + warpgroup * (ROWS // WORD)

                def read(i):
                    return [
                        refs["keep"][it.batch, it.head, i, first_word + w]
                        for w in range(ROWS // WORD)
                    ]

                def entry(n, carry, causal):
                    step, words = carry
                    i = num_query_blocks - 1 - n
                    # The next block's words are read ahead, to hide the latency.
                    following = read(lax.max(i - 1, 0))
                    bias = keep_bias(words, index)
                    first_query = refs["query_blocks"][i] * TILE if causal else 0
                    for part in range(_STEPS):

                        def mask(logits, part=part):
                            if causal:
                                key = rows_to_tile(tokens - first_query, logits)
                                passes = iota(logits, 1) + part * _STEP >= key
                                logits = jnp.where(passes, logits, -jnp.inf)
                            return logits, bias

                        query_step(step + part, mask, accumulate)
                    return step + _STEPS, following

                full, all_rows = num_query_blocks - it.full_row, num_query_blocks - it.first_row
                carry = jnp.int32(0), read(num_query_blocks - 1)
                carry = lax.fori_loop(0, full, lambda n, c: entry(n, c, False), carry)
                return lax.fori_loop(full, all_rows, lambda n, c: entry(n, c, True), carry)[0]

            plgpu.barrier_wait(bars["keys_full"])

            def walk(accumulate):
                if not has_columns:
                    return walk_block(accumulate)
                return lax.cond(
                    it.columns, lambda: walk_columns(accumulate), lambda: walk_block(accumulate)
                )

            if interpreted:
                for name in ("dk", "dv"):
                    smem[name][warpgroup] = jnp.zeros((ROWS, head_dim), jnp.float32)

                def accumulate(name, weights, tile):
                    smem["p"][warpgroup] = weights
                    plgpu.commit_smem()
                    shape = ROWS, head_dim
                    smem[name][warpgroup] += product(smem["p"].at[warpgroup], tile, shape)

                end = walk(accumulate)
                dk, dv = smem["dk"][warpgroup], smem["dv"][warpgroup]
            else:

                def body(dk_ref, dv_ref):
                    gradients = {"dk": dk_ref, "dv": dv_ref}
                    end = walk(lambda name, w, tile: plgpu.wgmma(gradients[name], w, tile))
                    return dk_ref[...], dv_ref[...], end

                acc = plgpu.ACC((ROWS, head_dim), jnp.float32)
                dk, dv, end = pl.run_scoped(body, acc, acc)
            if config.deferred:
                release(end - 1)
            rows = pl.ds(it.block * TILE + warpgroup * ROWS, ROWS)

            def store(suffix):
                refs["dk" + suffix].at[it.batch, rows, it.head][...] = dk * scale
                refs["dv" + suffix].at[it.batch, rows, it.head][...] = dv

            if has_columns:
                pl.when(it.columns)(lambda: store("c"))
                pl.when(jnp.logical_not(it.columns))(lambda: store(""))
            else:
                store("")

        pl.when(warpgroup == WARPGROUPS)(memory_warpgroup)
        pl.when(warpgroup < WARPGROUPS)(compute_warpgroup)

    smem = key_memory(stages, _STEP, head_dim, dtype, _ROW_OPERANDS, interpreted)
    arrays = [q, k, v, dout, base, minus_delta]
    arrays += [work.items, work.lists, work.first, work.last, work.diagonal]
    if has_columns:
        arrays += columns.operands

    def output(shape):
        if one_array:
            return jax.ShapeDtypeStruct((2, *shape), jnp.float32)
        return (jax.ShapeDtypeStruct(shape, jnp.float32),) * 2

    outputs = [output(k.shape)] + ([output(columns.k.shape)] if has_columns else [])
    flat, structure = jax.tree.flatten(outputs)
    run = launch(attention_dkdv, flat, [smem, key_barriers(stages)], num_items, interpret)
    keys, *columns = jax.tree.unflatten(structure, run(*arrays))
    return keys, columns[0] if has_columns else None
