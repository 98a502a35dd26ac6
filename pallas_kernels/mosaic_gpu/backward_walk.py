"""What an item of the fused backward kernel visits, in order: query blocks, steps and masks."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import backward_schedule as schedule
from pallas_kernels.mosaic_gpu.backward_schedule import BackwardWork
from pallas_kernels.mosaic_gpu.common import (
    ROW_LAYOUT,
    ROWS,
    TILE,
    WORD,
    iota,
    keep_bias,
    rows_to_tile,
)

_WORDS = ROWS // WORD

# Takes logits [keys, queries] and returns them masked, with an additive mask by key or None: added
# after scaling, it costs nothing.
MaskTile = Callable[[Array], tuple[Array, Array | None]]


class BackwardItem:
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


class BackwardWalk:
    """The walk of one item: by query blocks for what is copied, by steps for what is computed.

    Args:
        refs: operands of the kernel.
        it: the item.
        work: the list that it comes from.
        num_query_blocks: of the call.
        queries: of one step.
        has_columns: whether items of columns are in the list.
    """

    def __init__(
        self, refs: dict[str, Any], it: BackwardItem, work: BackwardWork, *,
        num_query_blocks: int, queries: int, has_columns: bool,
    ):
        self.refs, self.it, self.heads = refs, it, work.heads
        self.num_query_blocks, self.queries = num_query_blocks, queries
        self.parts = TILE // queries
        self.has_columns = has_columns

    def _entry(self, first: Array, last: Array, n: Array) -> Array:
        """The n-th list entry that an item visits."""
        return jnp.where(self.it.sign > 0, first + n, last - 1 - n)

    def row_blocks(self, visit: Callable[..., Any], carry: Any) -> Any:
        """Calls visit(head, row block, turn, carry) for each query block."""
        it, refs = self.it, self.refs

        def over_heads(carry: Any) -> Any:
            def member(m: Array, carry: Any) -> Any:
                head = it.head + m
                first = refs["first"][it.batch, head, it.block]
                last = refs["last"][it.batch, head, it.block]

                def entry(n: Array, carry: Any) -> Any:
                    s = self._entry(first, last, n)
                    row_block = it.block + refs["lists"][it.batch, head, s]
                    rank = refs["ranks"][it.batch, head, s]
                    turn = refs["turns"][it.batch, head, row_block] + it.sign * rank
                    return visit(head, row_block, turn, carry)

                return lax.fori_loop(0, last - first, entry, carry)

            return lax.fori_loop(0, self.heads, member, carry)

        def over_rows(carry: Any) -> Any:
            def entry(n: Array, carry: Any) -> Any:
                return visit(it.head, self.num_query_blocks - 1 - n, it.block, carry)

            return lax.fori_loop(0, self.num_query_blocks - it.first_row, entry, carry)

        if not self.has_columns:
            return over_heads(carry)
        return lax.cond(it.columns, over_rows, over_heads, carry)

    def steps(self, warpgroup: Array, run_step: Callable[[Array, MaskTile], Array]) -> Array:
        """Calls run_step(step, mask), which returns the next step; returns how many there were.

        Steps come in runs of tiles that share a kind of mask.
        """
        it, refs, has_columns = self.it, self.refs, self.has_columns
        parts, queries, num_query_blocks = self.parts, self.queries, self.num_query_blocks
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

        def read_words(n: Array) -> list[Array]:
            def read() -> list[Array]:
                i = num_query_blocks - 1 - n
                return [
                    refs["keep"][it.batch, it.head, i, words_at + w] for w in range(_WORDS)
                ]

            return lax.cond(it.columns, read, lambda: [jnp.int32(-1)] * _WORDS)

        def member(m: Array, step: Array) -> Array:
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

            def first_query(n: Array) -> Array:
                """Position of the first query, in the count of `key_positions`."""

                def of_block() -> Array:
                    offset = refs["lists"][it.batch, head, self._entry(first, last, n)]
                    return jnp.where(offset == refs["diagonal"][0], 0, TILE)

                def of_columns() -> Array:
                    return refs["query_blocks"][num_query_blocks - 1 - n] * TILE

                if not has_columns:
                    return of_block()
                return lax.cond(it.columns, of_columns, of_block)

            def run(start: Array, stop: Array, step: Array, causal: bool) -> Array:
                def one_step(i: Array, step: Array) -> Array:
                    n, part = lax.div(i, parts), lax.rem(i, parts)
                    words = read_words(n) if has_columns else None
                    shift = first_query(n) + part * queries if causal else None

                    def mask(logits: Array) -> tuple[Array, Array | None]:
                        if causal:
                            limit = rows_to_tile(key_positions - shift, logits)
                            logits = jnp.where(iota(logits, 1) >= limit, logits, -jnp.inf)
                        return logits, keep_bias(words, keys) if has_columns else None

                    return run_step(step, mask)

                return lax.fori_loop(start * parts, stop * parts, one_step, step)

            def phase(f: Array, step: Array) -> Array:
                """Twice: what lies before the masked tiles and they, then the rest."""
                start = jnp.where(f == 0, 0, before + masked)
                stop = jnp.where(f == 0, before, before + masked + after)
                step = run(start, stop, step, causal=False)
                end = jnp.where(f == 0, stop + masked, stop)
                return run(stop, end, step, causal=True)

            return lax.fori_loop(0, 2, phase, step)

        members = self.heads
        if has_columns:
            members = jnp.where(it.columns, 1, members)
        return lax.fori_loop(0, members, member, jnp.int32(0))
