"""The interface of all indices, and of their shards."""

import abc
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.tiles import Columns, Tiles


class Segment(NamedTuple):
    """Consecutive blocks of a shard, with global numbers in an arithmetic progression."""

    first_block: int | Array  # global number of the first block; may be traced
    stride: int  # difference of consecutive global numbers (static)
    num_blocks: int  # length of the progression (static)

    def blocks(self) -> Array:
        """Returns the global number of each block: int32 [num_blocks]."""
        steps = self.stride * jnp.arange(self.num_blocks, dtype=jnp.int32)
        return (self.first_block + steps).astype(jnp.int32)


class ShardTiles(abc.ABC):
    """The tiles of every pair of shards, prepared once per layer; all segments have one stride."""

    @abc.abstractmethod
    def pair(self, query: Segment, key: Segment) -> Tiles:
        """Returns the tiles of a query segment and a key segment, which may be longer."""

    @abc.abstractmethod
    def gathered(self, query: Segment, keys: Array, skip_own: bool) -> Tiles:
        """Returns the tiles of a query segment and several consecutive key segments.

        `keys`, int32 [n], are their first blocks, with different residues modulo the stride; each
        is as long as the query's. `skip_own` skips the queries' own segment.
        """


_MAX_MASK_BYTES = 2**32


class Rows(NamedTuple):
    """Positions of the rows of a `sharded_by_query` index, for one of the ranks that hold some."""

    blocks: Array  # int32 [n], the global block number of each local row
    total: Callable[[Any], Any]  # sums integer arrays (a pytree) over all ranks that hold rows


class Index(abc.ABC):
    """The (query, key) pairs that attention computes, in global token positions.

    An index is a frozen dataclass, registered as a pytree.

    Attributes:
        block_size: g, tokens per block (static).
        causal: whether pairs with k > q are excluded, even if listed (static).
        sharded_by_query: whether axis 2 of all arrays are rows, one per query block, of which each
            rank holds those of its own blocks, in its order. Other indices are replicated.
    """

    block_size: int
    causal: bool
    sharded_by_query: ClassVar[bool] = False

    @abc.abstractmethod
    def computed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        """Returns the number of computed (query, key) pairs, by definition of the index.

        Args:
            seq_len: S, tokens of the sequence, a multiple of the block size.
            rows: positions of the local rows of a `sharded_by_query` index; None if it holds all.

        Returns:
            float [B, Hq], or [1, 1] if all heads have the same pairs (fp64 under x64). Rounded,
            since it may exceed 2^31, but not accumulated in floating point.
        """

    @abc.abstractmethod
    def executed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        """Returns the number of pairs in executed tiles: g x g blocks, and g x 1 columns.

        Tiles cut by the causal diagonal count in full, the convention for executed FLOP in the
        benchmark tables. Arguments and result are those of `computed_pairs`.
        """

    @abc.abstractmethod
    def computes(self, query_positions: Array, key_blocks: Array) -> Array:
        """Whether each (query, key-block) pair is in a complete index, before causality.

        Takes token positions int32 [R] and block numbers int32 [C]. Returns bool that broadcasts to
        [B, Hq, R, C, g]; undefined past the sequence and for pairs with k > q.
        """

    def pairs_of_rows(self, rows: Rows | None = None) -> Array | None:
        """Returns the computed pairs per row of blocks, int32 [B, Hq, rows], or None if unknown.

        `rows` are the requested rows, for a `sharded_by_query` index the local ones; None for all.
        """
        return None

    def within_documents(self, first: Array, end: Array, rows: Array | None = None) -> Self:
        """Restricts the index to pairs within documents.

        `first`, int32 [B, NB], is the first block of each block's document (NB for none), `end` one
        past its last (0 for none), `rows` as in `TiledIndex.shards`.

        Raises:
            NotImplementedError: if this type of index cannot represent the result.
        """
        raise NotImplementedError(
            f"a {type(self).__name__} cannot be restricted to pairs within documents"
        )

    def budgets(self) -> dict[str, Array]:
        """Number of entries per kind: int32 [B, Hq] each."""
        return {}

    def known_seq_len(self) -> int | None:
        """Returns S if the index stores it, else None, also if it is stored in traced arrays."""
        return None

    @jax.numpy_rank_promotion("allow")
    def to_mask(self, seq_len: int | None = None) -> Array:
        """Returns the computed pairs as a mask, for short sequences.

        Args:
            seq_len: S; needed if the index does not store it (`known_seq_len`).

        Returns:
            bool [B, Hq, S, S], queries by keys; [1, 1, S, S] if all heads have the same pairs.

        Raises:
            ValueError: if S is unknown or wrong, or the mask has more than 4 GiB.
        """
        seq_len = self.known_seq_len() if seq_len is None else seq_len
        if seq_len is None:
            raise ValueError(
                "this index does not store the length of its sequence; pass to_mask(seq_len=...)"
            )
        if isinstance(seq_len, bool) or not isinstance(seq_len, int):
            raise ValueError(f"seq_len={seq_len!r} must be an integer")
        return _to_mask(self, seq_len)


class TiledIndex(Index):
    """An index that kernels compute as tiles and columns, on one device or on shards."""

    @abc.abstractmethod
    def on_one_device(
        self, batch: int, num_queries: int, num_heads: int, num_keys: int
    ) -> tuple[Tiles, Columns | None]:
        """Returns what kernels compute if one device holds the whole sequence in order.

        Raises:
            ValueError: if the index has another batch size or number of heads.
        """

    @abc.abstractmethod
    def shards(
        self, batch: int, num_heads: int, stride: int, num_blocks: int, rows: Array | None = None
    ) -> ShardTiles:
        """Returns the tiles for queries and keys sharded over the sequence; causal indices only.

        `stride` is that of all query and key segments, `num_blocks` S / g, `rows`, int32 [n], the
        block number of each local row of a `sharded_by_query` index; None if it holds all.
        """

    def column_tokens(self, every_row: Callable[[Array], Array] | None = None) -> Array | None:
        """Returns the key columns to gather: int32 [B, Hq, Mv] as in `Columns`, or None.

        For a `sharded_by_query` index, `every_row` gathers the rows of all ranks of an array
        [B, Hq, rows, ...], in sequence order; None if all rows are local.
        """
        return None

    def columns(
        self,
        query: Segment,
        num_blocks: int,
        tokens: Array | None = None,
        rows: Array | None = None,
    ) -> Columns | None:
        """Returns the gathered columns as seen by the queries of one segment, or None.

        For a `sharded_by_query` index, `tokens` are its `column_tokens` (None if it holds all
        rows), and `rows` are as in `shards`.
        """
        return None


# Jitted as a whole: eager execution would compile dozens of small programs.
@functools.partial(jax.jit, static_argnames="seq_len")
def _to_mask(index: Index, seq_len: int) -> Array:
    index.computed_pairs(seq_len)  # raises if the index has another length
    position, blocks = jnp.arange(seq_len), jnp.arange(seq_len // index.block_size)
    listed = index.computes(position, blocks)
    heads = listed.shape[:2]
    size = math.prod(heads) * seq_len**2
    if size > _MAX_MASK_BYTES:
        raise ValueError(
            f"a mask of [{heads[0]}, {heads[1]}, {seq_len}, {seq_len}] would have {size} bytes; "
            f"to_mask is limited to {_MAX_MASK_BYTES}, so select heads or a shorter sequence"
        )
    listed = jnp.broadcast_to(listed, (*heads, seq_len, blocks.size, index.block_size))
    mask = listed.reshape(*heads, seq_len, seq_len)
    return mask & (position <= position[:, None]) if index.causal else mask


def rows_or_all(rows: Rows | None, count: int) -> Rows:
    """Returns the given rows, or all `count` rows of an index that holds them."""
    return Rows(jnp.arange(count, dtype=jnp.int32), lambda counts: counts) if rows is None else rows


def tile_pairs(whole: Array, cut: Array, size: int) -> Array:
    """Counts the pairs in whole tiles and in tiles cut by the diagonal."""
    return whole * size**2 + cut * (size * (size + 1) // 2)


def as_float(count: Array) -> Array:
    """Converts a count for products that may exceed 2^31."""
    return count.astype(jnp.result_type(float))


def check_whole_blocks(seq_len: int, block_size: int) -> None:
    """Raises ValueError unless the block size divides the length."""
    if seq_len % block_size:
        raise ValueError(f"seq_len={seq_len} is not a multiple of block_size={block_size}")


def check_seq_len(index: Index, seq_len: int) -> None:
    """Raises ValueError if the index is for sequences of another length."""
    known = index.known_seq_len()
    if known not in (None, seq_len):
        raise ValueError(f"seq_len={seq_len}, but the index has {known} tokens")
