"""Traversal of one item of the fused backward kernel: query blocks, steps and masks, in order."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import masks
from pallas_kernels.mosaic_gpu.common import ROW_LAYOUT, ROWS, TILE, WORD
from pallas_kernels.mosaic_gpu.key_walk import over_window
from pallas_kernels.mosaic_gpu.masks import KeyMask
from pallas_kernels.work.fused_work import FusedWork
from pallas_kernels.work.items import KeyItem

_WORDS = ROWS // WORD


class FusedWalk:
    """The traversal of one item: by query blocks for copies, by steps for computation."""

    def __init__(self, refs: dict[str, Any], it: KeyItem, work: FusedWork, queries: int):
        self.refs, self.it, self.heads, self.window = refs, it, work.heads, work.window
        self.num_query_blocks, self.queries = refs["q"].shape[1] // TILE, queries
        self.parts, self.has_columns = TILE // queries, "keep" in refs
        # Computed once, since the kernel needs them in many places.
        self.columns, self.blocks = it.columns, it.blocks

    def _entry(self, first: Array, last: Array, n: Array) -> Array:
        return jnp.where(self.it.sign > 0, first + n, last - 1 - n)

    def row_blocks(self, visit: Callable[..., Any], carry: Any) -> Any:
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
        return lax.cond(self.columns, over_rows, over_heads, carry)

    def steps(self, warpgroup: Array, run_step: Callable[[Array, KeyMask], Array]) -> Array:
        """Calls run_step(step, mask), which returns the next step; returns the number of steps."""
        it, refs, has_columns = self.it, self.refs, self.has_columns
        parts, queries, num_query_blocks = self.parts, self.queries, self.num_query_blocks
        keys = masks.key_numbers()
        key_positions = keys + warpgroup * ROWS
        words_at = it.block * (TILE // WORD) + warpgroup * _WORDS
        if has_columns:
            first = jnp.where(self.columns, it.block, 0) * TILE + warpgroup * ROWS
            tokens = plgpu.load(
                refs["tokens"].at[it.batch, it.head, pl.ds(first, ROWS)],
                layout=ROW_LAYOUT,
                optimized=False,
            )
            key_positions += self.columns.astype(jnp.int32) * (tokens - key_positions)

        def read_words(n: Array) -> list[Array]:
            def read() -> list[Array]:
                return masks.keep_words(
                    refs["keep"], it, num_query_blocks - 1 - n, words_at, _WORDS
                )

            return lax.cond(self.columns, read, lambda: [jnp.int32(-1)] * _WORDS)

        def member(m: Array, step: Array) -> Array:
            head = it.head + m
            first = refs["first"][it.batch, head, jnp.where(self.columns, 0, it.block)]
            last = refs["last"][it.batch, head, jnp.where(self.columns, 0, it.block)]
            one = lax.min(1, last - first)
            rising = it.sign > 0
            before = jnp.where(rising, 0, last - first - one)
            after = jnp.where(rising, last - first - one, 0)
            masked = one
            if has_columns:
                before = jnp.where(self.columns, num_query_blocks - it.full_row, before)
                masked = jnp.where(self.columns, it.full_row - it.first_row, masked)
                after = jnp.where(self.columns, 0, after)

            def first_query(n: Array) -> Array:
                def block_first_query() -> Array:
                    offset = refs["lists"][it.batch, head, self._entry(first, last, n)]
                    return masks.diagonal_shift(offset, refs["diagonal"][0])

                def columns_first_query() -> Array:
                    return refs["query_blocks"][num_query_blocks - 1 - n] * TILE

                if not has_columns:
                    return block_first_query()
                return lax.cond(self.columns, columns_first_query, block_first_query)

            def run(start: Array, stop: Array, step: Array, causal: bool) -> Array:
                def one_step(i: Array, step: Array) -> Array:
                    n, part = lax.div(i, parts), lax.rem(i, parts)
                    words: Any = read_words(n) if has_columns else None
                    mask = KeyMask(
                        bias=(lambda: masks.keep_bias(words, keys)) if has_columns else None
                    )
                    if causal and self.window is not None:
                        mask = KeyMask(key_positions, i * queries, window=self.window)
                    elif causal:
                        start = first_query(n) + part * queries
                        mask = dataclasses.replace(mask, keys=key_positions, first_query=start)
                    return run_step(step, mask)

                return lax.fori_loop(start * parts, stop * parts, one_step, step)

            def phase(f: Array, step: Array) -> Array:
                """Runs twice: up to and including the masked tiles, then the rest."""
                start = jnp.where(f == 0, 0, before + masked)
                stop = jnp.where(f == 0, before, before + masked + after)
                step = run(start, stop, step, causal=False)
                end = jnp.where(f == 0, stop + masked, stop)
                return run(stop, end, step, causal=True)

            if self.window is not None:
                return over_window(self.window, first, last, run, step)
            return lax.fori_loop(0, 2, phase, step)

        members = self.heads
        if has_columns:
            members = jnp.where(self.columns, 1, members)
        return lax.fori_loop(0, members, member, jnp.int32(0))
