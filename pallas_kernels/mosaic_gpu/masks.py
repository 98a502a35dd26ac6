"""Tile masks of logits, [queries, keys] in kernels that own queries, else [keys, queries]."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.common import (
    COLUMN_LAYOUT,
    ROW_LAYOUT,
    ROWS,
    TILE,
    WORD,
    columns_to_tile,
    iota,
    rows_to_tile,
)
from pallas_kernels.work.items import KeyItem, QueryItem


def diagonal_shift(offset: Array, diagonal: Array) -> Array:
    """Returns 0 for the masked offset, else a shift by which every query of the tile passes."""
    return jnp.where(offset == diagonal, 0, TILE)


def keep_words(
    keep: Any, it: QueryItem | KeyItem, row_block: Array, first_word: Array | int, count: int
) -> list[Array]:
    """Loads words of the keep mask of a query block from global memory, 32 columns' bits each."""
    return [keep[it.batch, it.head, row_block, first_word + word] for word in range(count)]


def keep_bias(words: list[Array], index: Array) -> Array:
    """Returns 0 where bit `index` of the concatenated 32-bit words is set, else -inf."""
    word = jnp.zeros_like(index)
    for part, bits in enumerate(words):
        word = jnp.where(index >= WORD * part, bits, word)
    bit = lax.shift_right_logical(word, index & (WORD - 1)) & 1
    return jnp.where(bit == 1, 0.0, -jnp.inf)


class QueryMask:
    """Keeps every logit [queries, keys] of a tile; subclasses mask some."""

    def prepare(self, s: Array) -> Any:
        """Reads global memory; called before waiting for the products, which hides the latency."""

    def await_bias(self, bars: dict[str, Any], slot: Array) -> None: ...

    def bias(self, smem: dict[str, Any], slot: Array, column: int, width: int) -> Array | None:
        """Returns the initial value of the logits."""

    def apply(self, prepared: Any, logits: Array, column: int = 0) -> Array:
        """Masks the logits of keys `column`, `column` + 1, ..."""
        return logits


@dataclasses.dataclass(frozen=True)
class DiagonalMask(QueryMask):
    """Masks a tile that may be on the causal diagonal; leaves others unchanged."""

    walk: Any  # the `QueryWalk` of the kernel
    it: QueryItem
    warpgroup: Array

    def prepare(self, s: Array) -> Array:
        offset = self.it.block - self.walk.key_block(self.it, s)
        shift = diagonal_shift(offset, self.walk.refs["diagonal"][0])
        return self.warpgroup * ROWS + shift

    def apply(self, prepared: Array, logits: Array, column: int = 0) -> Array:
        passes = iota(logits, 0) + (prepared - column) >= iota(logits, 1)
        return jnp.where(passes, logits, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class WindowMask(QueryMask):
    """Masks a tile at an edge of a sliding window: the first one is on the causal diagonal."""

    window: int
    warpgroup: Array
    first: bool

    def prepare(self, s: Array) -> Array:
        return self.warpgroup * ROWS + s * TILE

    def apply(self, prepared: Array, logits: Array, column: int = 0) -> Array:
        row, key = iota(logits, 0) + (prepared - column), iota(logits, 1)
        if self.first:
            logits = jnp.where(row >= key, logits, -jnp.inf)
        if not self.first or self.window < TILE:
            logits = jnp.where(row - self.window < key, logits, -jnp.inf)
        return logits


@dataclasses.dataclass(frozen=True)
class ColumnMask(QueryMask):
    """Masks a tile of gathered columns by keep bits (a bias) and, with `causal`, by position."""

    walk: Any  # the `QueryWalk` of the kernel
    it: QueryItem
    warpgroup: Array
    causal: bool

    def prepare(self, s: Array) -> Array:
        return self.it.column_tile(s - self.it.tiles)

    def await_bias(self, bars: dict[str, Any], slot: Array) -> None:
        plgpu.barrier_wait(bars["bias_full"].at[slot])

    def bias(self, smem: dict[str, Any], slot: Array, column: int, width: int) -> Array:
        values = plgpu.load(smem["bias"].at[slot, pl.ds(column, width)], layout=COLUMN_LAYOUT)
        return lax.broadcast_in_dim(values, (ROWS, width), [1])

    def apply(self, prepared: Array, logits: Array, column: int = 0) -> Array:
        if not self.causal:
            return logits
        refs, it, width = self.walk.refs, self.it, logits.shape[1]
        tokens = plgpu.load(
            refs["tokens"].at[it.batch, it.head, pl.ds(prepared * TILE + column, width)],
            layout=COLUMN_LAYOUT,
            optimized=False,
        )
        first_row = refs["query_blocks"][it.block] * TILE + self.warpgroup * ROWS
        passes = iota(logits, 0) >= columns_to_tile(tokens - first_row, logits)
        return jnp.where(passes, logits, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class KeyMask:
    keys: Array | None = None  # int32 [64], the position of each key; None: not causal
    first_query: Array | int = 0  # of the step, relative to the keys' origin
    bias: Callable[[], Array] | None = None  # returns an additive mask by key
    window: int | None = None  # of the keys, also masks queries this far behind or farther

    def apply(self, logits: Array) -> tuple[Array, Array | None]:
        """Returns logits with -inf where the query precedes the key, and a bias to add."""
        if self.keys is not None:
            limit = rows_to_tile(self.keys - self.first_query, logits)
            logits = jnp.where(iota(logits, 1) >= limit, logits, -jnp.inf)
            if self.window is not None:
                logits = jnp.where(iota(logits, 1) - self.window < limit, logits, -jnp.inf)
        return logits, None if self.bias is None else self.bias()


def add_bias(logits: Array, bias: Array | None) -> Array:
    return logits if bias is None else logits + rows_to_tile(bias, logits)


def key_numbers() -> Array:
    """Returns the numbers of a warpgroup's keys, by rows: int32 [64]."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW_LAYOUT)
