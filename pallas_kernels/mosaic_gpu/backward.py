"""Hopper backward kernel for everything at once: dq, dk and dv from five products a tile.

A thread block owns 128 keys, 64 for each compute warpgroup, keeps their dk and dv in registers
and walks the queries that see them. What a step adds to dq leaves through shared memory and is
added up in global memory, in the order of `backward_schedule`: the same bits every time.

dQ of a step needs dS of both warpgroups. It is taken one step late, so that the warpgroups need
not run in step: one uses the tensor cores while the other computes exponentials.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import backward_schedule as schedule
from pallas_kernels.mosaic_gpu.backward_schedule import BackwardWork
from pallas_kernels.mosaic_gpu.common import (
    COLUMN_LAYOUT,
    COMPILER_PARAMS,
    LOG2E,
    ROW_LAYOUT,
    ROWS,
    TILE,
    WARPGROUPS,
    WORD,
    iota,
    keep_bias,
    product_plus,
    rows_to_tile,
    tiled,
)
from pallas_kernels.mosaic_gpu.turns import await_turn, end_turn
from pallas_kernels.tiles import VerticalColumns

_WORDS = ROWS // WORD


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Tuning of the fused backward kernel, and of the order of its work."""

    stages: int = 2  # steps of queries in flight
    early_s: bool = True  # S is issued before dq of the step before is awaited and stored
    retire_dv: bool = True  # dV is awaited before dK is issued: P's registers are free then
    retire_dk: bool = False  # dK is awaited before the next step begins
    ds_from_memory: bool = True  # dK reads dS from shared memory, not from registers
    split_heads: bool = False  # an item a query head: see `backward_work`
    waves: bool = False  # sequences alternate after as many items as there are multiprocessors
    compute_registers: int = 240
    memory_registers: int = 24


class _Item:
    """One item of the work list, read from global memory."""

    def __init__(self, items: Any, n: Array):
        kind = items[n, schedule.KIND]
        self.columns, self.blocks = kind == schedule.KEY_COLUMNS, kind == schedule.KEY_BLOCKS
        self.batch = items[n, schedule.BATCH]
        self.head = items[n, schedule.HEAD]
        self.block = items[n, schedule.BLOCK]
        self.first_row = items[n, schedule.FIRST_ROW]
        self.full_row = items[n, schedule.FULL_ROW]
        self.sign = items[n, schedule.SIGN]
        self.key_turn = items[n, schedule.KEY_TURN]


def step_queries(head_dim: int) -> int:
    """Queries of one step: as many as shared memory and registers hold."""
    return 64 * 128 // head_dim


def backward_kernel(
    q: Array, k: Array, v: Array, dout: Array, base: Array, minus_delta: Array, dq: Array,
    work: BackwardWork, verticals: VerticalColumns | None, *, scale: float,
    out_dtype: jnp.dtype = jnp.float32, config: BackwardConfig | None = None,
    interpret: Any = False,
) -> tuple[Array, Array | None, Array | None, Array | None, Array | None]:
    """Runs the kernel: dv = P^T dO, dS = P * (dP - delta), dk = scale dS^T Q, dq += scale dS K.

    Args:
        q, dout: [B, nq, Hq, D] bf16 or fp16, D 64 or 128, nq a multiple of 128.
        k, v: [B, nk, Hk, D].
        base: fp32 [B, Hq, nq], -lse / scale of the rows' final lse; -inf for empty rows.
        minus_delta: fp32 [B, Hq, nq].
        dq: fp32 [B, nq, Hq, D], what dq is added to; in place where XLA can.
        work: from `backward_work`.
        verticals: the columns that `work` refers to.
        scale: of the logits.
        out_dtype: of dk and dv; fp32 where `work` splits heads.
        config: tuning.
        interpret: False, or parameters of the Pallas GPU interpreter.

    Returns:
        fp32 dq; dk, dv [B, nk, Hk, D], summed over the query heads of a group; fp32 dk, dv of
        the columns [B, Mv, Hq, D] (None without verticals).
    """
    config = config or BackwardConfig()
    head_dim, group = q.shape[-1], q.shape[2] // k.shape[2]
    dtype, out_dtype = q.dtype, jnp.dtype(out_dtype)
    split = work.heads < group
    if split and out_dtype != jnp.float32:
        raise ValueError(f"dk and dv of split heads are added up in float32, not {out_dtype}")
    stages = config.stages
    num_query_blocks = q.shape[1] // TILE
    queries = step_queries(head_dim)
    parts = TILE // queries
    interpreted = bool(interpret)
    has_columns = verticals is not None
    log2_scale = scale * LOG2E
    names = ["q", "k", "v", "dout", "shift", "minus_delta"]
    names += ["items", "lists", "first", "last", "diagonal", "turns"]
    names += ["kc", "vc", "keep", "tokens", "query_blocks"] if has_columns else []
    names += ["dk", "dv"] + (["dkc", "dvc"] if has_columns else []) + ["smem", "bars"]
    batch, heads, kv_heads = q.shape[0], q.shape[2], k.shape[2]
    dq_ref = jax.new_ref(dq)
    counters = jax.new_ref(jnp.zeros((batch, heads, q.shape[1] // queries, 1), jnp.int32))
    key_shape = (batch, kv_heads, k.shape[1] // ROWS, 1) if split else (1, 1, 1, 1)
    key_counters = jax.new_ref(jnp.zeros(key_shape, jnp.int32))

    def attention_backward(*arguments):
        refs = dict(zip(names, arguments, strict=True))
        smem, bars = refs["smem"], refs["bars"]
        warpgroup = lax.axis_index("wg")
        # One item a thread block: the hardware starts them in order, the next where one ends.
        it = _Item(refs["items"], lax.axis_index("block"))
        kv_head = lax.div(it.head, group)

        def entry_of(first, last, n):
            """The n-th list entry that an item visits."""
            return jnp.where(it.sign > 0, first + n, last - 1 - n)

        def over_row_blocks(visit, carry):
            """Calls visit(head, row block, turn, carry) in the order of the walk."""

            def over_heads(carry):
                def member(m, carry):
                    head = it.head + m
                    first = refs["first"][it.batch, head, it.block]
                    last = refs["last"][it.batch, head, it.block]

                    def entry(n, carry):
                        s = entry_of(first, last, n)
                        row_block = it.block + refs["lists"][it.batch, head, s]
                        turn = refs["turns"][it.batch, head, row_block] + it.sign * s
                        return visit(head, row_block, turn, carry)

                    return lax.fori_loop(0, last - first, entry, carry)

                return lax.fori_loop(0, work.heads, member, carry)

            def over_rows(carry):
                def entry(n, carry):
                    return visit(it.head, num_query_blocks - 1 - n, it.block, carry)

                return lax.fori_loop(0, num_query_blocks - it.first_row, entry, carry)

            if not has_columns:
                return over_heads(carry)
            return lax.cond(it.columns, over_rows, over_heads, carry)

        def load():
            """The copying side: keys and values once, then the queries of each step."""
            keys = pl.ds(it.block * TILE, TILE)

            def load_keys(suffix, head):
                for name in ("k", "v"):
                    plgpu.copy_gmem_to_smem(
                        refs[name + suffix].at[it.batch, keys, head], smem[name],
                        bars["keys_full"],
                    )

            if has_columns:
                pl.when(it.columns)(lambda: load_keys("c", it.head))
                pl.when(it.blocks)(lambda: load_keys("", kv_head))
            else:
                load_keys("", kv_head)

            def visit(head, row_block, turn, step):
                for part in range(parts):
                    slot = lax.rem(step + part, stages)

                    @pl.when(step + part >= stages)
                    def _(slot=slot):
                        plgpu.barrier_wait(bars["free"].at[slot])

                    rows = pl.ds(row_block * TILE + part * queries, queries)
                    for name in ("q", "dout"):
                        plgpu.copy_gmem_to_smem(
                            refs[name].at[it.batch, rows, head], smem[name].at[slot],
                            bars["full"].at[slot],
                        )
                    for name in ("shift", "minus_delta"):
                        plgpu.copy_gmem_to_smem(
                            refs[name].at[it.batch, head, rows], smem[name].at[slot],
                            bars["full"].at[slot],
                        )
                return step + parts

            steps = over_row_blocks(visit, jnp.int32(0))

            # Every completion of a barrier must be awaited, the last ones too.
            def drain(step, _):
                plgpu.barrier_wait(bars["free"].at[lax.rem(step, stages)])

            lax.fori_loop(lax.max(0, steps - stages), steps, drain, None)

        def store():
            """The adding side: dq of each step, when it is its turn."""

            def visit(head, row_block, turn, _):
                for part in range(parts):
                    tile = row_block * parts + part
                    rows = pl.ds(row_block * TILE + part * queries, queries)
                    counter = counters.at[it.batch, head, tile, pl.ds(0, 1)]
                    target = dq_ref.at[it.batch, rows, head]
                    plgpu.barrier_wait(bars["dq_full"])
                    if interpreted:
                        # Items run one after another here: it must be their turn already.
                        early = counters[it.batch, head, tile, 0] != turn
                        poison = jnp.where(early, jnp.float32(jnp.nan), jnp.float32(0))
                        target[...] = target[...] + (smem["dq"][...] + poison)
                        counters[it.batch, head, tile, 0] = turn + 1
                        plgpu.barrier_arrive(bars["dq_free"])
                        continue
                    await_turn(counter, turn)
                    plgpu.copy_smem_to_gmem(smem["dq"], target, reduction_op="add")
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(bars["dq_free"])
                    plgpu.wait_smem_to_gmem(0)
                    end_turn(counter)

            over_row_blocks(visit, None)

        def memory_warpgroup():
            plgpu.set_max_registers(config.memory_registers, action="decrease")

            @plgpu.warp_map
            def _(warp):
                pl.when(warp == 0)(load)
                pl.when(warp == 1)(store)

        def compute_warpgroup():
            plgpu.set_max_registers(config.compute_registers, action="increase")

            def own_share():
                """The keys of this warpgroup, and the columns or rows of dq.

                The compiler must not know that it is the same at every step: it would keep all
                addresses that follow from it in registers.
                """
                return pl.ds(lax.optimization_barrier(warpgroup) * ROWS, ROWS)

            def dq_operands(slot, own):
                """dS of all keys, and K, for the share of dq that this warpgroup computes."""
                ds = smem["ds"].at[slot]
                if head_dim == 128:  # a half of the columns
                    return ds.T, smem["k"].at[:, own]
                return ds.at[:, own].T, smem["k"]

            def await_ds(step):
                plgpu.barrier_wait(bars["ds_full"].at[lax.rem(step, 2)])

            def release(step):
                plgpu.barrier_arrive(bars["free"].at[lax.rem(step, stages)])

            def stage_dq(dq, step):
                """Hands the dq of a step to the adding side."""

                @pl.when(step > 0)
                def _():
                    plgpu.barrier_wait(bars["dq_free"])

                own = own_share()
                target = smem["dq"].at[:, own] if head_dim == 128 else smem["dq"].at[own]
                target[...] = dq * scale
                plgpu.commit_smem()
                plgpu.barrier_arrive(bars["dq_full"])

            def publish_ds(ds, step):
                smem["ds"].at[lax.rem(step, 2), own_share()][...] = ds
                plgpu.commit_smem()
                plgpu.barrier_arrive(bars["ds_full"].at[lax.rem(step, 2)])

            def finish_previous(dq, step):
                """With dq of the step before, all of its products are done."""

                @pl.when(step > 0)
                def _():
                    release(step - 1)
                    stage_dq(dq, step - 1)

            shape = (ROWS, queries)

            def columns(name, slot):
                values = plgpu.load(smem[name].at[slot], layout=COLUMN_LAYOUT)
                return lax.broadcast_in_dim(values, shape, [1])

            def weights(logits, mask, slot):
                """P: softmax weights, by the final lse of each query."""
                logits, bias = mask(logits)
                logits = logits * log2_scale + columns("shift", slot)
                return jnp.exp2(logits if bias is None else logits + rows_to_tile(bias, logits))

            def query_step(step, mask, dk_ref, dv_ref):
                """Adds the gradients from the queries of a step, and dq of the one before.

                `mask` takes logits and returns them masked, with an additive mask by key or
                None: added after scaling, it costs nothing.
                """
                slot = lax.rem(step, stages)
                q_tile, dout_tile = smem["q"].at[slot], smem["dout"].at[slot]
                pl.when(step > 0)(lambda: await_ds(step - 1))

                def body(dq_acc, s_acc, dp_acc):
                    # At the first step this reads what nobody wrote, and nobody reads it.
                    plgpu.wgmma(dq_acc, *dq_operands(lax.rem(step + 1, 2), own_share()))
                    if not config.early_s:
                        finish_previous(plgpu.wgmma_accumulator_load(dq_acc, wait_n=0), step)
                    plgpu.barrier_wait(bars["full"].at[slot])
                    plgpu.wgmma(s_acc, smem["k"].at[own_share()], q_tile.T)
                    if config.early_s:
                        finish_previous(plgpu.wgmma_accumulator_load(dq_acc, wait_n=1), step)
                    # The accumulator starts from -delta, which would otherwise be subtracted
                    # element by element.
                    dp_acc[...] = columns("minus_delta", slot)
                    plgpu.wgmma(dp_acc, smem["v"].at[own_share()], dout_tile.T)
                    p = weights(plgpu.wgmma_accumulator_load(s_acc, wait_n=1), mask, slot)
                    plgpu.wgmma(dv_ref, p.astype(dtype), dout_tile)
                    ds = (p * plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)).astype(dtype)
                    publish_ds(ds, step)
                    if config.retire_dv:
                        plgpu.wgmma_wait(0)
                    if config.ds_from_memory:
                        own_ds = smem["ds"].at[lax.rem(step, 2), own_share()]
                        plgpu.wgmma(dk_ref, own_ds, q_tile)
                    else:
                        plgpu.wgmma(dk_ref, ds, q_tile)
                    if config.retire_dk:
                        plgpu.wgmma_wait(0)

                tile = plgpu.ACC(shape, jnp.float32)
                pl.run_scoped(body, plgpu.ACC((ROWS, ROWS), jnp.float32), tile, tile)
                return step + 1

            def interpreted_step(step, mask, dk_ref, dv_ref):
                """The same in what the interpreter knows: no accumulators across products."""
                slot = lax.rem(step, stages)
                q_tile, dout_tile = smem["q"].at[slot], smem["dout"].at[slot]
                own = own_share()

                @pl.when(step > 0)
                def _():
                    await_ds(step - 1)
                    finish_previous(previous_dq(step), step)

                plgpu.barrier_wait(bars["full"].at[slot])

                def accumulate(ref, weights, tile):
                    smem["p"][warpgroup] = weights
                    plgpu.commit_smem()
                    ref[...] += product(smem["p"].at[warpgroup], tile, (ROWS, head_dim))

                p = weights(product(smem["k"].at[own], q_tile.T, shape), mask, slot)
                accumulate(dv_ref, p.astype(dtype), dout_tile)
                dp = product_plus(
                    lambda: columns("minus_delta", slot), smem["v"].at[own], dout_tile.T, shape,
                    interpreted,
                )
                ds = (p * dp).astype(dtype)
                accumulate(dk_ref, ds, q_tile)
                publish_ds(ds, step)
                return step + 1

            def product(a, b, shape):
                def run(ref):
                    plgpu.wgmma(ref, a, b)
                    return ref[...]

                return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))

            def previous_dq(step):
                a, b = dq_operands(lax.rem(step + 1, 2), own_share())
                return product(a, b, (ROWS, ROWS))

            def walk(run_step: Callable[..., Array]) -> Array:
                """All steps of the item: runs of tiles that share a kind of mask."""
                keys = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW_LAYOUT)
                key_positions = keys + warpgroup * ROWS
                words_at = it.block * (TILE // WORD) + warpgroup * _WORDS
                if has_columns:
                    first = jnp.where(it.columns, it.block, 0) * TILE + warpgroup * ROWS
                    tokens = plgpu.load(
                        refs["tokens"].at[it.batch, it.head, pl.ds(first, ROWS)],
                        layout=ROW_LAYOUT, optimized=False,
                    )
                    key_positions += it.columns.astype(jnp.int32) * (tokens - key_positions)

                def read_words(n):
                    def read():
                        i = num_query_blocks - 1 - n
                        return [
                            refs["keep"][it.batch, it.head, i, words_at + w]
                            for w in range(_WORDS)
                        ]

                    return lax.cond(it.columns, read, lambda: [jnp.int32(-1)] * _WORDS)

                def member(m, step):
                    head = it.head + m
                    first = refs["first"][it.batch, head, jnp.where(it.columns, 0, it.block)]
                    last = refs["last"][it.batch, head, jnp.where(it.columns, 0, it.block)]
                    one = lax.min(1, last - first)
                    rising = it.sign > 0
                    before = jnp.where(rising, 0, last - first - one)
                    after = jnp.where(rising, last - first - one, 0)
                    masked = one
                    if has_columns:
                        before = jnp.where(it.columns, num_query_blocks - it.full_row, before)
                        masked = jnp.where(it.columns, it.full_row - it.first_row, masked)
                        after = jnp.where(it.columns, 0, after)

                    def first_query(n):
                        """Position of the first query, in the count of `key_positions`."""

                        def of_block():
                            offset = refs["lists"][it.batch, head, entry_of(first, last, n)]
                            return jnp.where(offset == refs["diagonal"][0], 0, TILE)

                        def of_columns():
                            return refs["query_blocks"][num_query_blocks - 1 - n] * TILE

                        if not has_columns:
                            return of_block()
                        return lax.cond(it.columns, of_columns, of_block)

                    def run(start, stop, step, causal):
                        def one_step(i, step):
                            n, part = lax.div(i, parts), lax.rem(i, parts)
                            words = read_words(n) if has_columns else None
                            shift = first_query(n) + part * queries if causal else None

                            def mask(logits):
                                if causal:
                                    limit = rows_to_tile(key_positions - shift, logits)
                                    logits = jnp.where(iota(logits, 1) >= limit, logits, -jnp.inf)
                                return logits, keep_bias(words, keys) if has_columns else None

                            return run_step(step, mask)

                        return lax.fori_loop(start * parts, stop * parts, one_step, step)

                    def phase(f, step):
                        """Twice: what lies before the masked tiles and they, then the rest."""
                        start = jnp.where(f == 0, 0, before + masked)
                        stop = jnp.where(f == 0, before, before + masked + after)
                        step = run(start, stop, step, causal=False)
                        end = jnp.where(f == 0, stop + masked, stop)
                        return run(stop, end, step, causal=True)

                    return lax.fori_loop(0, 2, phase, step)

                members = work.heads
                if has_columns:
                    members = jnp.where(it.columns, 1, members)
                return lax.fori_loop(0, members, member, jnp.int32(0))

            plgpu.barrier_wait(bars["keys_full"])
            if interpreted:
                dk_ref, dv_ref = smem["dk"].at[warpgroup], smem["dv"].at[warpgroup]
                dk_ref[...] = dv_ref[...] = jnp.zeros((ROWS, head_dim), jnp.float32)
                end = walk(lambda step, mask: interpreted_step(step, mask, dk_ref, dv_ref))
                dk, dv = dk_ref[...], dv_ref[...]
            else:

                def body(dk_ref, dv_ref):
                    end = walk(lambda step, mask: query_step(step, mask, dk_ref, dv_ref))
                    return dk_ref[...], dv_ref[...], end

                acc = plgpu.ACC((ROWS, head_dim), jnp.float32)
                dk, dv, end = pl.run_scoped(body, acc, acc)

            @pl.when(end > 0)
            def _():
                await_ds(end - 1)
                finish_previous(previous_dq(end), end)

            rows = pl.ds(it.block * TILE + warpgroup * ROWS, ROWS)

            def store_keys(suffix, head):
                refs["dk" + suffix].at[it.batch, rows, head][...] = (
                    dk * scale
                ).astype(out_dtype if not suffix else jnp.float32)
                refs["dv" + suffix].at[it.batch, rows, head][...] = dv.astype(
                    out_dtype if not suffix else jnp.float32
                )

            def add_keys():
                """Adds to what the items before left: other heads with the same keys."""
                counter = key_counters.at[
                    it.batch, kv_head, it.block * WARPGROUPS + warpgroup, pl.ds(0, 1)
                ]
                if not interpreted:
                    await_turn(counter, it.key_turn, warp=False)
                for name, x in (("dk", dk * scale), ("dv", dv)):
                    target = refs[name].at[it.batch, rows, kv_head]

                    @pl.when(it.key_turn == 0)
                    def _(target=target, x=x):
                        target[...] = x

                    @pl.when(it.key_turn > 0)
                    def _(target=target, x=x):
                        before = plgpu.load(target, layout=plgpu.Layout.WGMMA, optimized=False)
                        target[...] = before + x

                if not interpreted:
                    end_turn(counter, warp=False)

            if has_columns:
                pl.when(it.columns)(lambda: store_keys("c", it.head))
            own_keys = add_keys if split else lambda: store_keys("", kv_head)
            if has_columns:
                pl.when(it.blocks)(own_keys)
            else:
                own_keys()

            @pl.when(end > 0)
            def _():
                plgpu.barrier_wait(bars["dq_free"])

        if interpreted:
            pl.when(warpgroup == WARPGROUPS)(load)
            pl.when(warpgroup == WARPGROUPS + 1)(store)
        else:
            pl.when(warpgroup == WARPGROUPS)(memory_warpgroup)
        pl.when(warpgroup < WARPGROUPS)(compute_warpgroup)

    smem = {
        "k": tiled((TILE, head_dim), dtype),
        "v": tiled((TILE, head_dim), dtype),
        "q": tiled((stages, queries, head_dim), dtype),
        "dout": tiled((stages, queries, head_dim), dtype),
        "shift": plgpu.SMEM((stages, queries), jnp.float32),
        "minus_delta": plgpu.SMEM((stages, queries), jnp.float32),
        "ds": tiled((2, TILE, queries), dtype),
        "dq": plgpu.SMEM(
            (queries, head_dim), jnp.float32,
            transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),
        ),
    }
    if interpreted:
        smem["p"] = tiled((WARPGROUPS, ROWS, queries), dtype)
        smem["dk"] = plgpu.SMEM((WARPGROUPS, ROWS, head_dim), jnp.float32)
        smem["dv"] = plgpu.SMEM((WARPGROUPS, ROWS, head_dim), jnp.float32)
    bars = {
        "keys_full": plgpu.Barrier(num_arrivals=2),
        "full": plgpu.Barrier(num_arrivals=4, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        "ds_full": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=2),
        "dq_full": plgpu.Barrier(num_arrivals=WARPGROUPS),
        "dq_free": plgpu.Barrier(),
    }
    arrays = [q, k, v, dout, base * log2_scale, minus_delta]
    arrays += [work.items, work.lists, work.first, work.last, work.diagonal, work.turns]
    outputs = [jax.ShapeDtypeStruct(k.shape, out_dtype)] * 2
    if has_columns:
        arrays += [
            verticals.k, verticals.v, lax.bitcast_convert_type(verticals.keep, jnp.int32),
            verticals.tokens, verticals.query_blocks,
        ]
        outputs += [jax.ShapeDtypeStruct(verticals.k.shape, jnp.float32)] * 2
    results = plgpu.kernel(
        attention_backward,
        out_type=outputs,
        scratch_types=[smem, bars],
        grid=(work.items.shape[0],),
        grid_names=("block",),
        num_threads=WARPGROUPS + (2 if interpreted else 1),
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
    )(*arrays)
    columns = results[2:] if has_columns else (None, None)
    return jax.freeze(dq_ref), *results[:2], *columns
