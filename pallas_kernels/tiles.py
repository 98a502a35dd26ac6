"""What the kernels walk: an index resolved for one shard of queries and one shard of keys.

A kernel sees local blocks only: query block i of its query shard, key block j of its key shard.
Shards are arithmetic progressions of global blocks (one for a striped rank, two for a zigzag
rank), so a global block diagonal d becomes one local offset o = i - j for the whole shard pair:
the problem stays Toeplitz, and one short list per head describes it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.index import BlockSparseIndex, VerticalSlashIndex

NO_DIAGONAL = np.int32(np.iinfo(np.int32).min)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["offsets", "start", "stop", "diagonal"],
    meta_fields=["block_size", "dense"],
)
@dataclasses.dataclass(frozen=True)
class DiagonalTiles:
    """Block diagonals of a (query shard, key shard) pair, per batch entry and query head.

    Local query block i computes local key block i - o for every live offset o for which that
    block exists. Tiles with o == `diagonal` lie on the causal diagonal and are masked by
    element (row >= column); every other tile is computed whole.

    Attributes:
        offsets: int32 [B, Hq, M], M >= 1, ascending within the live range, any value outside.
        start: int32 [B, Hq], first live entry of `offsets`.
        stop: int32 [B, Hq], one past the last live entry.
        diagonal: int32 [], the masked offset, or `NO_DIAGONAL`. No live offset is lower: such
            tiles would lie wholly in the future of their queries.
        block_size: g (static).
        dense: whether all tiles of the shard pair are live that causality allows (static). A
            kernel may be chosen by it; what is computed is what the lists say.
    """

    offsets: Array
    start: Array
    stop: Array
    diagonal: Array
    block_size: int
    dense: bool = False

    @classmethod
    def from_index(cls, index: VerticalSlashIndex) -> "DiagonalTiles":
        """The tiles of an index when one shard holds the whole sequence in its own order."""
        offsets = index.slash_blocks
        if offsets.shape[-1] == 0:  # an index of verticals alone: kernels get one dead entry
            offsets = jnp.zeros((*offsets.shape[:-1], 1), jnp.int32)
        return cls(
            offsets=offsets,
            start=jnp.zeros_like(index.slash_count),
            stop=index.slash_count,
            diagonal=jnp.int32(0),
            block_size=index.block_size,
        )

    @classmethod
    def full(
        cls, batch: int, num_heads: int, num_query_blocks: int, num_key_blocks: int,
        block_size: int, causal: bool,
    ) -> "DiagonalTiles":
        """Every tile (non-causal), or every tile on and below the diagonal (causal)."""
        first = 0 if causal else 1 - num_key_blocks
        offsets = jnp.arange(first, num_query_blocks, dtype=jnp.int32)
        shape = (batch, num_heads)
        return cls(
            offsets=jnp.broadcast_to(offsets, (*shape, offsets.size)),
            start=jnp.zeros(shape, jnp.int32),
            stop=jnp.full(shape, offsets.size, jnp.int32),
            diagonal=jnp.int32(0) if causal else jnp.asarray(NO_DIAGONAL),
            block_size=block_size,
            dense=True,
        )

    def row_ranges(self, num_query_blocks: int, num_key_blocks: int) -> tuple[Array, Array]:
        """For each query block, the range of `offsets` whose key block exists.

        Returns:
            first, last: int32 [B, Hq, num_query_blocks]; entries first..last-1 apply.
        """
        rows = jnp.arange(num_query_blocks, dtype=jnp.int32)
        return _between(self.offsets, self.start, self.stop, rows - (num_key_blocks - 1), rows)

    def column_ranges(self, num_query_blocks: int, num_key_blocks: int) -> tuple[Array, Array]:
        """For each key block, the range of `offsets` whose query block exists.

        Returns:
            first, last: int32 [B, Hq, num_key_blocks]; entries first..last-1 apply.
        """
        columns = jnp.arange(num_key_blocks, dtype=jnp.int32)
        return _between(
            self.offsets, self.start, self.stop, -columns, num_query_blocks - 1 - columns
        )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["offsets", "start", "stop", "segment", "diagonal"],
    meta_fields=["num_segments", "block_size", "dense"],
)
@dataclasses.dataclass(frozen=True)
class SegmentedDiagonals:
    """Block diagonals of one query shard over several key shards that lie one after another.

    What `DiagonalTiles` is to one key shard, for keys gathered from several ranks. The key blocks
    are `num_segments` segments of equal length. A run of offsets belongs to one segment: query
    block i computes key block i - o for every offset o of a run for which that block lies in the
    run's segment. A kernel walks one segment after another, so that neighbouring query blocks
    read neighbouring key blocks at any time.

    Attributes:
        offsets: int32 [B, Hq, M], M >= 1, ascending within each run, any value outside of runs.
        start: int32 [B, Hq, R], first entry of each run in `offsets`.
        stop: int32 [B, Hq, R], one past the last entry of each run.
        segment: int32 [R], the segment of each run; no two are equal.
        diagonal: int32 [], the offset whose tiles are masked by element, or `NO_DIAGONAL`. It is
            the lowest of the first run, and in no other.
        num_segments: of the keys (static).
        block_size: g (static).
        dense: whether all tiles of these segments are live that causality allows (static), as in
            `DiagonalTiles`.
    """

    offsets: Array
    start: Array
    stop: Array
    segment: Array
    diagonal: Array
    num_segments: int
    block_size: int
    dense: bool = False

    def row_ranges(self, num_query_blocks: int, num_key_blocks: int) -> tuple[Array, Array]:
        """For each query block and run, the range of `offsets` whose key block exists.

        Returns:
            first, last: int32 [B, Hq, R, num_query_blocks]; entries first..last-1 apply.
        """
        rows = jnp.arange(num_query_blocks, dtype=jnp.int32)
        size = num_key_blocks // self.num_segments
        return _between(self._within(size), self.start, self.stop, rows - (size - 1), rows)

    def column_ranges(self, num_query_blocks: int, num_key_blocks: int) -> tuple[Array, Array]:
        """For each key block, the range of `offsets` whose query block exists.

        Returns:
            first, last: int32 [B, Hq, num_key_blocks]; entries first..last-1 apply.
        """
        size = num_key_blocks // self.num_segments
        columns = jnp.arange(size, dtype=jnp.int32)
        ranges = _between(
            self._within(size), self.start, self.stop, -columns, num_query_blocks - 1 - columns
        )
        shape = (*self.start.shape[:2], self.num_segments, size)

        def place(x: Array) -> Array:
            every = jnp.zeros(shape, jnp.int32).at[:, :, self.segment].set(x, unique_indices=True)
            return every.reshape(*shape[:2], num_key_blocks)

        first, last = ranges
        return place(first), place(last)

    def _within(self, size: int) -> Array:
        """Int32 [B, Hq, R, M]: the offsets as counted within the segment of each run."""
        return self.offsets[:, :, None, :] + (self.segment * size)[:, None]


def _between(
    offsets: Array, start: Array, stop: Array, low: Array, high: Array
) -> tuple[Array, Array]:
    """The live entries with low <= offset <= high, for each element of low and high.

    Args:
        offsets: int32 [..., M], ascending from `start` to `stop` - 1.
        start, stop: int32 [...].
        low, high: int32 [n].

    Returns:
        first, last: int32 [..., n]; entries first..last-1 apply.
    """
    slots = jnp.arange(offsets.shape[-1], dtype=jnp.int32)
    live = (slots >= start[..., None]) & (slots < stop[..., None])
    offsets = jnp.where(live, offsets, jnp.iinfo(jnp.int32).max)
    first = start[..., None] + count_below(offsets, low)
    last = start[..., None] + count_below(offsets, high + 1)
    return first, jnp.maximum(first, last)


def count_below(entries: Array, bounds: Array) -> Array:
    """How many entries are less than each bound.

    One pass over all pairs: a binary search takes fewer comparisons and many small kernels.

    Args:
        entries: int32 [..., M].
        bounds: int32 [n], or [..., n] whose leading dimensions broadcast with those of entries.

    Returns:
        int32 [..., n].
    """
    return jnp.sum(entries[..., None, :] < bounds[..., :, None], axis=-1, dtype=jnp.int32)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["k", "v", "tokens", "count", "keep", "limit", "query_blocks"],
    meta_fields=["block_size"],
)
@dataclasses.dataclass(frozen=True)
class VerticalColumns:
    """Gathered key columns, per batch entry and query head, as one shard of queries sees them.

    Query token t of local block i computes column c iff `keep` bit (i, c) is set and
    tokens[c] <= position of t.

    Attributes:
        k, v: [B, Mv, Hq, D], the gathered keys and values; Mv is a multiple of 128.
        tokens: int32 [B, Hq, Mv], global positions, ascending; padding is past every query.
        count: int32 [B, Hq].
        keep: uint32 [B, Hq, num_query_blocks, Mv // 32]; bit c % 32 of word c // 32. A bit is
            off where the column lies in an active block (it is counted there) or in a later
            block than the queries.
        limit: int32 [B, Hq, num_query_blocks], one past the last column with its bit on.
        query_blocks: int32 [num_query_blocks], global block number of each local query block,
            ascending.
        block_size: g (static).
    """

    k: Array
    v: Array
    tokens: Array
    count: Array
    keep: Array
    limit: Array
    query_blocks: Array
    block_size: int


COLUMN_TILE = 128


def pad_columns(index: VerticalSlashIndex) -> Array:
    """`index.vertical_tokens` padded so that its capacity is a multiple of `COLUMN_TILE`."""
    tokens = index.vertical_tokens
    padding = -tokens.shape[-1] % COLUMN_TILE
    slots = jnp.arange(tokens.shape[-1], dtype=jnp.int32)
    past = jnp.int32(jnp.iinfo(jnp.int32).max)
    tokens = jnp.where(slots < index.vertical_count[..., None], tokens, past)
    return jnp.pad(tokens, ((0, 0), (0, 0), (0, padding)), constant_values=past)


def vertical_columns(
    index: VerticalSlashIndex, k: Array, v: Array, query_blocks: Array, num_blocks: int
) -> VerticalColumns:
    """Resolves the verticals of an index for one shard of queries.

    Args:
        index: the global index.
        k: [B, Mv, Hq, D], keys gathered at `pad_columns(index)`.
        v: [B, Mv, Hq, D], values gathered at the same positions.
        query_blocks: int32 [n], global block number of each local query block.
        num_blocks: S / g, blocks of the whole sequence.
    """
    g = index.block_size
    tokens = pad_columns(index)
    active = active_diagonals(index, num_blocks)
    column_blocks = jnp.minimum(tokens // g, num_blocks)
    distance = query_blocks[:, None] - column_blocks[..., None, :]  # [B, Hq, n, Mv]
    covered = jnp.take_along_axis(
        active[:, :, None, :], jnp.maximum(distance, 0), axis=-1, mode="clip"
    )
    keep = (distance >= 0) & ~covered
    slots = jnp.arange(tokens.shape[-1], dtype=jnp.int32)
    limit = jnp.max(jnp.where(keep, slots + 1, 0), axis=-1, initial=0)
    words = keep.reshape(*keep.shape[:-1], -1, 32).astype(jnp.uint32)
    words = jnp.sum(words << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    return VerticalColumns(
        k, v, tokens, index.vertical_count, words, limit, query_blocks.astype(jnp.int32), g
    )


def active_diagonals(index: VerticalSlashIndex, num_blocks: int) -> Array:
    """Bool [B, Hq, num_blocks]: whether block diagonal d is computed."""
    slots = jnp.arange(index.slash_blocks.shape[-1], dtype=jnp.int32)
    live = slots < index.slash_count[..., None]
    diagonals = jnp.where(live, index.slash_blocks, num_blocks)

    def mark(row: Array) -> Array:
        return jnp.zeros(num_blocks, bool).at[row].set(True, mode="drop")

    return jax.vmap(jax.vmap(mark))(diagonals)


def gather_columns(x: Array, tokens: Array) -> Array:
    """Columns of keys or values for each query head.

    Args:
        x: [B, S, Hk, D].
        tokens: int [B, Hq, Mv] positions along S; those outside [0, S) give zeros.

    Returns:
        [B, Mv, Hq, D].
    """
    group = tokens.shape[1] // x.shape[2]
    heads = jnp.arange(tokens.shape[1], dtype=jnp.int32) // group
    batch = jnp.arange(x.shape[0], dtype=jnp.int32)
    # Negative positions would wrap around: send them past the end, where "fill" applies.
    tokens = jnp.where(tokens < 0, x.shape[1], tokens)
    return x.at[
        batch[:, None, None], tokens.swapaxes(1, 2), heads[None, None, :]
    ].get(mode="fill", fill_value=0)


def scatter_columns(target: Array, columns: Array, tokens: Array) -> Array:
    """Adds gradients of gathered columns to the keys or values they came from.

    Query heads of a group are added one after another, each with unique positions, so the sum
    has one order and the same inputs give the same bits on every platform.

    Args:
        target: fp32 [B, S, Hk, D].
        columns: fp32 [B, Mv, Hq, D].
        tokens: int [B, Hq, Mv] positions along S, unique per head; those outside are dropped.
    """
    num_kv_heads = target.shape[2]
    group = tokens.shape[1] // num_kv_heads
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)
    batch = jnp.arange(target.shape[0], dtype=jnp.int32)
    # Dropped positions get distinct values past the end: unique_indices must hold for them too.
    slots = jnp.arange(tokens.shape[-1], dtype=jnp.int32)
    outside = (tokens < 0) | (tokens >= target.shape[1])
    tokens = jnp.where(outside, target.shape[1] + slots, tokens)
    tokens = tokens.reshape(tokens.shape[0], num_kv_heads, group, -1)
    columns = columns.reshape(*columns.shape[:2], num_kv_heads, group, -1)
    for member in range(group):
        target = target.at[
            batch[:, None, None], tokens[:, :, member].swapaxes(1, 2), heads[None, None, :]
        ].add(columns[:, :, :, member], mode="drop", unique_indices=True)
    return target


Tiles = DiagonalTiles | SegmentedDiagonals | BlockSparseIndex
