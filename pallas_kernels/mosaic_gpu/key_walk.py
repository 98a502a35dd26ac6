"""Traversal of an item of the kernel for dk and dv: query blocks, steps and masks."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import masks
from pallas_kernels.mosaic_gpu.common import ROW_LAYOUT, ROWS, TILE, WORD
from pallas_kernels.mosaic_gpu.masks import KeyMask
from pallas_kernels.work.items import KeyItem
from pallas_kernels.work.key_work import PARTS, KeyWork
from pallas_kernels.work.lists import far_entry

_WORDS = ROWS // WORD  # words of the keep mask for the keys of a warpgroup

# run_step(step, mask) adds the gradients from the queries of a step.
RunStep = Callable[[Array, KeyMask], None]


def over_window(
    window: int, first: Array, last: Array, run: Callable[..., Array], step: Array
) -> Array:
    """Calls run(start, stop, step, masked) for the entries of keys, their distances in blocks."""
    near, far = (lax.max(first, lax.min(n, last)) for n in (1, far_entry(window)))

    def phase(f: Array, step: Array) -> Array:
        """Runs for the causal diagonal, and for the rest; the code of masks is there once."""
        start, stop = jnp.where(f == 0, first, near), jnp.where(f == 0, first, far)
        step = run(start, stop, step, False)
        return run(stop, jnp.where(f == 0, near, last), step, True)

    return lax.fori_loop(0, 2, phase, step)


class KeyWalk:
    """The traversal of one item: by query blocks for copies, by steps for computation."""

    def __init__(self, refs: dict[str, Any], it: KeyItem, work: KeyWork, queries: int):
        self.refs, self.it, self.listed, self.queries = refs, it, work.listed, queries
        self.group = refs["q"].shape[2] // refs["k"].shape[2]
        self.end_row = it.sign if work.ends else refs["q"].shape[1] // TILE  # for columns
        self.parts = TILE // queries
        self.window = work.window
        self.has_columns, self.has_parts = "keep" in refs, work.heavy is not None

    def load_all(self, stream: Any) -> Array:
        return self._either(lambda: self._load_columns(stream), lambda: self._load_block(stream))

    def run_all(self, warpgroup: Array | None, run_step: RunStep) -> Array:
        """Runs the steps for the keys of a warpgroup; with None, masks mask nothing."""
        args = warpgroup, run_step
        return self._either(lambda: self._run_columns(*args), lambda: self._run_block(*args))

    def _either(self, columns: Callable[[], Array], block: Callable[[], Array]) -> Array:
        return lax.cond(self.it.columns, columns, block) if self.has_columns else block()

    def _query_block(self, head: Array, s: Array) -> Array:
        it, lists = self.it, self.refs["lists"]
        if self.listed:
            return lists[it.batch, head, it.block, s]
        return it.block + lists[it.batch, head, s]

    def _over_heads(self, visit: Callable[..., Array]) -> Array:
        it, refs = self.it, self.refs

        def member(m: Array, step: Array) -> Array:
            head = it.head * self.group + m
            first = refs["first"][it.batch, head, it.block]
            last = refs["last"][it.batch, head, it.block]
            if self.has_parts:
                first, last = self._part_of(first, last)
            return visit(head, first, last, step)

        return lax.fori_loop(0, self.group, member, jnp.int32(0))

    def _part_of(self, first: Array, last: Array) -> tuple[Array, Array]:
        it, count = self.it, last - first
        start = first + lax.div(count * it.first_row, PARTS)
        stop = first + lax.div(count * (it.first_row + 1), PARTS)
        return jnp.where(it.part, start, first), jnp.where(it.part, stop, last)

    def _load_block(self, stream: Any) -> Array:
        it = self.it
        stream.load_keys(it.batch, it.block, it.head)

        def visit(head: Array, first: Array, last: Array, step: Array) -> Array:
            def entry(s: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                number, step = carry
                # The next entry is prefetched, to hide the latency.
                following = self._query_block(head, lax.min(s + 1, last - 1))
                return following, stream.load_block(it.batch, head, number, step)

            start = lax.cond(
                last > first, lambda: self._query_block(head, first), lambda: jnp.int32(0)
            )
            return lax.fori_loop(first, last, entry, (start, step))[1]

        return self._over_heads(visit)

    def _load_columns(self, stream: Any) -> Array:
        it, count = self.it, self.end_row
        stream.load_keys(it.batch, it.block, it.head, "c")

        # From the last query block backwards: all column tiles of a head start there together and
        # read the same queries, which the L2 cache then serves.
        def entry(n: Array, step: Array) -> Array:
            return stream.load_block(it.batch, it.head, count - 1 - n, step)

        return lax.fori_loop(0, count - it.first_row, entry, jnp.int32(0))

    def _run_block(self, warpgroup: Array | None, run_step: RunStep) -> Array:
        """Implements `run_all` for a block of keys: only a list's first entry can be diagonal."""
        keys = None if warpgroup is None else masks.key_numbers() + warpgroup * ROWS

        def visit(head: Array, first: Array, last: Array, step: Array) -> Array:
            def masked(s: Array, step: Array) -> Array:
                # Every first entry is compared: a branch would double the code, and the comparison
                # is hidden by the products.
                offset = self._query_block(head, s) - self.it.block
                shift = masks.diagonal_shift(offset, self.refs["diagonal"][0])
                return self._parts(
                    step, run_step, lambda part: KeyMask(keys, part * self.queries + shift)
                )

            def plain(s: Array, step: Array) -> Array:
                return self._parts(step, run_step, lambda part: KeyMask())

            def cut(s: Array, step: Array) -> Array:
                def mask(part: int) -> KeyMask:
                    return KeyMask(keys, s * TILE + part * self.queries, window=self.window)

                return self._parts(step, run_step, mask)

            if self.window is not None:

                def run(start: Array, stop: Array, step: Array, masked: bool) -> Array:
                    return lax.fori_loop(start, stop, cut if masked else plain, step)

                return over_window(self.window, first, last, run, step)
            one = lax.min(first + 1, last)
            step = lax.fori_loop(first, one, masked, step)
            return lax.fori_loop(one, last, plain, step)

        return self._over_heads(visit)

    def _run_columns(self, warpgroup: Array | None, run_step: RunStep) -> Array:
        it, refs, count = self.it, self.refs, self.end_row
        if warpgroup is None:

            def unmasked(n: Array, step: Array) -> Array:
                return self._parts(step, run_step, lambda part: KeyMask())

            return lax.fori_loop(0, count - it.first_row, unmasked, jnp.int32(0))
        rows = pl.ds(it.block * TILE + warpgroup * ROWS, ROWS)
        tokens = plgpu.load(
            refs["tokens"].at[it.batch, it.head, rows], layout=ROW_LAYOUT, optimized=False
        )
        numbers = masks.key_numbers()
        first_word = it.block * (TILE // WORD) + warpgroup * _WORDS

        def read(row_block: Array) -> list[Array]:
            return masks.keep_words(refs["keep"], it, row_block, first_word, _WORDS)

        def entry(n: Array, carry: tuple[Array, list[Array]], causal: bool):
            step, words = carry
            row_block = count - 1 - n
            # The next block's words are prefetched, to hide the latency.
            following = read(lax.max(row_block - 1, 0))
            bias = masks.keep_bias(words, numbers)
            first_query = refs["query_blocks"][row_block] * TILE if causal else 0

            def mask(part: int) -> KeyMask:
                start = first_query + part * self.queries
                return KeyMask(tokens if causal else None, start, lambda: bias)

            return self._parts(step, run_step, mask), following

        full, every = count - it.full_row, count - it.first_row
        latest = jnp.int32(count - 1) if isinstance(count, int) else lax.max(count - 1, 0)
        carry = jnp.int32(0), read(latest)
        carry = lax.fori_loop(0, full, lambda n, carry: entry(n, carry, False), carry)
        return lax.fori_loop(full, every, lambda n, carry: entry(n, carry, True), carry)[0]

    def _parts(self, step: Array, run_step: RunStep, mask: Callable[[int], KeyMask]) -> Array:
        for part in range(self.parts):
            run_step(step + part, mask(part))
        return step + self.parts
