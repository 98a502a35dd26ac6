"""Block tiles of a kernel call: listed, and on diagonals of blocks.

Tiles are of one shard of queries and one or, on diagonals, more shards of keys. A global block
diagonal becomes one local offset o = i - j for a whole pair of shards.
"""

import abc
import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

NO_DIAGONAL = np.int32(np.iinfo(np.int32).min)

Lists = tuple[Array, Array, Array]


class Tiles(abc.ABC):
    """The (query block, key block) tiles that one kernel call computes.

    Blocks are numbered within the call. Tiles with offset i - j == `diagonal` are on the causal
    diagonal and masked per element (row >= column); all others are computed in full. A masked tile
    is the first entry of a block's range, or the last in a query block's own list (`listed`).
    Subclasses are frozen dataclasses, registered as pytrees.
    """

    diagonal: Array  # int32 [], the masked offset, or `NO_DIAGONAL`
    block_size: int  # g (static)
    # Whether entries are block numbers, int32 [B, Hq, n, M] for n own blocks (static). Otherwise
    # they are offsets, int32 [B, Hq, M], the same for all own blocks.
    listed: bool
    # Whether all tiles allowed by causality and documents are computed (static). Kernels may be
    # selected by it; the lists determine what is computed.
    dense: bool
    num_segments: int  # equal segments of the keys, processed one at a time (static)
    window: int | None = None  # see `DiagonalTiles` (static)

    @abc.abstractmethod
    def row_lists(self, num_query_blocks: int, num_key_blocks: int) -> Lists:
        """Returns entries, and the range first .. last - 1 of those of each query block.

        Ranges are int32 [B, Hq, nq], or [B, Hq, R, nq] for R consecutive ones.
        """

    @abc.abstractmethod
    def column_lists(self, num_query_blocks: int, num_key_blocks: int) -> Lists:
        """Returns entries, and the range of each key block, int32 [B, Hq, nk]."""

    @abc.abstractmethod
    def check(self, batch: int, heads: int, num_query_blocks: int, num_key_blocks: int) -> None: ...


def at_least_one(lists: Array) -> Array:
    """Appends an invalid entry to lists without capacity; kernels need at least one entry."""
    return lists if lists.shape[-1] else jnp.zeros((*lists.shape[:-1], 1), jnp.int32)


def check_shape(name: str, x: Array | None, shape: tuple[int, ...]) -> None:
    if x is None:
        raise ValueError(f"{name} is None; expected shape {shape}")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}; expected {shape}")


def check_lists(name: str, x: Array, leading: tuple[int, ...]) -> None:
    """Raises ValueError unless `x` has shape [*leading, at least one]."""
    if x.shape[:-1] != leading or x.shape[-1] == 0:
        raise ValueError(
            f"{name} has shape {x.shape}; expected [{', '.join(map(str, leading))}, ...] with at "
            "least one entry in each list"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ListedTiles(Tiles):
    """A list of key blocks for each query block, and the transpose; for tiles of any shape.

    Lists ascend, except that the masked key block, if listed, comes last. Entries from a count on
    are arbitrary. By causality a key block's masked query block is its first.
    """

    key_blocks: Array  # int32 [B, Hq, nq, M], M >= 1, key blocks of each query block
    key_count: Array  # int32 [B, Hq, nq]
    query_blocks: Array  # int32 [B, Hq, nk, M'], M' >= 1, query blocks of each key block
    query_count: Array  # int32 [B, Hq, nk]
    diagonal: Array  # int32 [], the masked offset i - j, or `NO_DIAGONAL`
    block_size: int = jax.tree.static()  # g

    listed: ClassVar[bool] = True
    dense: ClassVar[bool] = False
    num_segments: ClassVar[int] = 1

    def row_lists(self, num_query_blocks: int, num_key_blocks: int) -> Lists:
        return self.key_blocks, jnp.zeros_like(self.key_count), self.key_count

    def column_lists(self, num_query_blocks: int, num_key_blocks: int) -> Lists:
        return self.query_blocks, jnp.zeros_like(self.query_count), self.query_count

    def check(self, batch: int, heads: int, num_query_blocks: int, num_key_blocks: int) -> None:
        for own, lists, count, number in (
            ("key", self.key_blocks, self.key_count, num_query_blocks),
            ("query", self.query_blocks, self.query_count, num_key_blocks),
        ):
            check_shape(f"tiles.{own}_count", count, (batch, heads, number))
            check_lists(f"tiles.{own}_blocks", lists, (batch, heads, number))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiagonalTiles(Tiles):
    """Block diagonals of a (query shard, key shard) pair, per batch entry and query head.

    Local query block i computes local key block i - o for every valid offset o for which that
    block exists and is in the same document. None for the last two fields: all are in one document.
    """

    offsets: Array  # int32 [B, Hq, M], M >= 1, ascending within the valid range
    start: Array  # int32 [B, Hq], first valid entry
    stop: Array  # int32 [B, Hq], one past the last
    diagonal: Array  # int32 [], the masked offset, the lowest valid one, or `NO_DIAGONAL`
    block_size: int = jax.tree.static()  # g
    dense: bool = jax.tree.static(default=False)
    # int32 [B, 1, nq], first key block of each query block's document, maybe outside of the shard.
    first_keys: Array | None = None
    # int32 [B, 1, nk], one past the last query block of each key block's document; equal for all
    # key blocks that a query block sees.
    end_queries: Array | None = None
    # Tokens of a sliding window: pairs at this distance or farther are masked per element. Offsets
    # are then `diagonal`, `diagonal` + 1, ..., all valid, and the queries are those of the last
    # keys.
    window: int | None = jax.tree.static(default=None)

    listed: ClassVar[bool] = False
    num_segments: ClassVar[int] = 1

    @classmethod
    def full(
        cls,
        batch: int,
        num_heads: int,
        num_query_blocks: int,
        num_key_blocks: int,
        block_size: int,
        causal: bool,
    ) -> Self:
        """Builds all tiles (non-causal), or all tiles on and below the diagonal (causal)."""
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

    def row_lists(self, num_query_blocks: int, num_key_blocks: int) -> Lists:
        rows = jnp.arange(num_query_blocks, dtype=jnp.int32)
        limits = rows - (num_key_blocks - 1), _farthest(rows, self.first_keys)
        return self.offsets, *_between(self.offsets, self.start, self.stop, *limits)

    def column_lists(self, num_query_blocks: int, num_key_blocks: int) -> Lists:
        columns = jnp.arange(num_key_blocks, dtype=jnp.int32)
        limits = -columns, _last(num_query_blocks, self.end_queries) - columns
        return self.offsets, *_between(self.offsets, self.start, self.stop, *limits)

    def check(self, batch: int, heads: int, num_query_blocks: int, num_key_blocks: int) -> None:
        shape = batch, heads
        check_shape("tiles.start", self.start, shape)
        check_shape("tiles.stop", self.stop, shape)
        check_lists("tiles.offsets", self.offsets, shape)
        if self.first_keys is not None:
            check_shape("tiles.first_keys", self.first_keys, (batch, 1, num_query_blocks))
            check_shape("tiles.end_queries", self.end_queries, (batch, 1, num_key_blocks))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SegmentedDiagonals(Tiles):
    """Block diagonals of one query shard over several consecutive key shards (segments).

    A run of offsets belongs to one segment: query block i computes key block i - o for every offset
    o of a run for which that block is in the run's segment. Kernels process runs in order.
    """

    offsets: Array  # int32 [B, Hq, M], M >= 1, ascending within each run
    start: Array  # int32 [B, Hq, R], first entry of each run
    stop: Array  # int32 [B, Hq, R], one past the last
    segment: Array  # int32 [R], the segment of each run; unique
    diagonal: Array  # int32 [], the masked offset, the lowest of the first run, or `NO_DIAGONAL`
    num_segments: int = jax.tree.static()  # of equal length
    block_size: int = jax.tree.static()  # g
    dense: bool = jax.tree.static(default=False)
    # As in `DiagonalTiles`, by run: int32 [B, 1, R, nq], relative to the run's segment; and int32
    # [B, 1, R, nk / num_segments].
    first_keys: Array | None = None
    end_queries: Array | None = None

    listed: ClassVar[bool] = False

    def row_lists(self, num_query_blocks: int, num_key_blocks: int) -> Lists:
        rows = jnp.arange(num_query_blocks, dtype=jnp.int32)
        size = num_key_blocks // self.num_segments
        limits = rows - (size - 1), _farthest(rows, self.first_keys)
        return self.offsets, *_between(self._within(size), self.start, self.stop, *limits)

    def column_lists(self, num_query_blocks: int, num_key_blocks: int) -> Lists:
        size = num_key_blocks // self.num_segments
        columns = jnp.arange(size, dtype=jnp.int32)
        limits = -columns, _last(num_query_blocks, self.end_queries) - columns
        first, last = _between(self._within(size), self.start, self.stop, *limits)
        shape = (*self.start.shape[:2], self.num_segments, size)

        def place(x: Array) -> Array:
            every = jnp.zeros(shape, jnp.int32).at[:, :, self.segment].set(x, unique_indices=True)
            return every.reshape(*shape[:2], num_key_blocks)

        return self.offsets, place(first), place(last)

    def check(self, batch: int, heads: int, num_query_blocks: int, num_key_blocks: int) -> None:
        shape = batch, heads
        check_shape("tiles.start", self.start, (*shape, *self.segment.shape))
        check_shape("tiles.stop", self.stop, (*shape, *self.segment.shape))
        check_lists("tiles.offsets", self.offsets, shape)
        if num_key_blocks % self.num_segments:
            raise ValueError(
                f"k has {num_key_blocks * self.block_size} tokens; expected a multiple of "
                f"num_segments={self.num_segments} x block_size={self.block_size}"
            )
        if self.first_keys is not None:
            runs, size = self.segment.shape[0], num_key_blocks // self.num_segments
            check_shape("tiles.first_keys", self.first_keys, (batch, 1, runs, num_query_blocks))
            check_shape("tiles.end_queries", self.end_queries, (batch, 1, runs, size))

    def _within(self, size: int) -> Array:
        return self.offsets[:, :, None, :] + (self.segment * size)[:, None]


def _farthest(rows: Array, first_keys: Array | None) -> Array:
    return rows if first_keys is None else jnp.minimum(rows, rows - first_keys)


def _last(num_query_blocks: int, end_queries: Array | None) -> int | Array:
    last = num_query_blocks - 1
    return last if end_queries is None else jnp.minimum(last, end_queries - 1)


def _between(
    offsets: Array, start: Array, stop: Array, low: Array, high: Array
) -> tuple[Array, Array]:
    """Finds the valid entries first .. last - 1 with low <= offset <= high: int32 [..., n] each."""
    slots = jnp.arange(offsets.shape[-1], dtype=jnp.int32)
    live = (slots >= start[..., None]) & (slots < stop[..., None])
    offsets = jnp.where(live, offsets, jnp.iinfo(jnp.int32).max)
    first = start[..., None] + count_below(offsets, low)
    last = start[..., None] + count_below(offsets, high + 1)
    return first, jnp.maximum(first, last)


def count_below(entries: Array, bounds: Array) -> Array:
    """Counts the entries int32 [..., M] below each bound, int32 [n] or [..., n], in one pass."""
    return jnp.sum(entries[..., None, :] < bounds[..., :, None], axis=-1, dtype=jnp.int32)
