"""The interface of every kind of index."""

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from jax import Array

if TYPE_CHECKING:
    from pallas_kernels.index.shards import Segment, ShardTiles
    from pallas_kernels.tiles import Columns, Tiles


class Rows(NamedTuple):
    """Where the rows of an index that is `by_rows` lie, as seen by one of those who hold some.

    Attributes:
        blocks: int32 [n], the global block number of each row that is held here.
        total: adds an array of integers over all who hold rows.
    """

    blocks: Array
    total: Callable[[Array], Array]


class Index(abc.ABC):
    """Which (query, key) pairs attention computes, in global token positions.

    A kind of index is a frozen dataclass, registered as a pytree. It alone knows how its pairs
    are written down: everything else asks by the methods below.

    Attributes:
        block_size: g, tokens on one side of a block (static).
        causal: whether pairs with k > q are left out, whatever is listed (static).
        key_shards_apart: whether the tiles for the keys of one rank after another take no more
            room than those for all keys at once. A ring that turns keys needs that.
        by_rows: whether axis 2 of all arrays are rows, one for each block of queries. Where a
            sequence lies on several ranks, each then holds the rows of its own blocks, in their
            order. Other indices are the same on every rank.
        composed: whether no tiles say it, and attention is put together from several calls
            (`pallas_kernels.composed`).
    """

    block_size: int
    causal: bool
    key_shards_apart: ClassVar[bool] = True
    by_rows: ClassVar[bool] = False
    composed: ClassVar[bool] = False

    @abc.abstractmethod
    def computed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        """Number of (query, key) pairs that are computed, by the contract of the index.

        Args:
            seq_len: S, tokens of the sequence, a multiple of the block size.
            rows: of an index `by_rows`, where they lie; None if all of them are here. Others
                ignore it.

        Returns:
            Float [B, Hq], or [1, 1] where all heads have the same pairs (fp64 under x64). Rounded,
            since it may exceed 2^31, but not accumulated in floats.
        """

    def pairs_of_rows(self, rows: Rows | None = None) -> Array | None:
        """The same by rows of blocks, of an index that can tell.

        Args:
            rows: which rows are asked for; of an index `by_rows` those that are held here.

        Returns:
            int32 [B, Hq, rows]: of each of the rows, all of them without `rows`; None where it
            cannot be told.
        """
        return None

    @abc.abstractmethod
    def executed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        """Number of pairs in the tiles that kernels execute: g x g blocks, and g x 1 columns.

        A tile that the causal diagonal cuts counts as a whole. This is the convention of executed
        FLOP in the benchmark tables.

        Args:
            seq_len: as in `computed_pairs`, like `rows`.
            rows: see there.

        Returns:
            Float [B, Hq] or [1, 1], rounded as in `computed_pairs`.
        """

    @abc.abstractmethod
    def computes(self, query_positions: Array, key_blocks: Array) -> Array:
        """Which pairs of some queries and the keys of some blocks the index lists.

        Causality is left to the caller: results for pairs with k > q mean nothing. An index
        `by_rows` holds all rows here.

        Args:
            query_positions: int32 [R], global token positions.
            key_blocks: int32 [C], global block numbers; those past the sequence list nothing or
                anything.

        Returns:
            Bool, broadcasts to [B, Hq, R, C, g].
        """

    @abc.abstractmethod
    def on_one_device(
        self, batch: int, num_queries: int, num_heads: int, num_keys: int
    ) -> "tuple[Tiles, Columns | None]":
        """What kernels compute where one device holds the whole sequence in its own order.

        Args:
            batch: B.
            num_queries: Sq, a multiple of the block size.
            num_heads: Hq.
            num_keys: Sk, a multiple of the block size; Sq if the index is causal.

        Raises:
            ValueError: if the arrays of the index are for another batch or number of heads.
        """

    @abc.abstractmethod
    def shards(
        self, batch: int, num_heads: int, stride: int, num_blocks: int, rows: Array | None = None
    ) -> "ShardTiles":
        """The tiles where queries and keys are shards of the sequence; of a causal index alone.

        Args:
            batch: B.
            num_heads: Hq.
            stride: of all segments of queries and keys.
            num_blocks: S / g.
            rows: of an index `by_rows`, int32 [n], the global block number of each row it holds;
                None if it holds all. Others ignore it.

        Raises:
            ValueError: as `on_one_device`.
        """

    def column_tokens(self, every_row: Callable[[Array], Array] | None = None) -> Array | None:
        """Key columns to gather: int32 [B, Hq, Mv] global positions as in `Columns`, or None.

        Args:
            every_row: of an index `by_rows`, gives an array [B, Hq, rows, ...] with the rows of all
                who hold some, in the order of the sequence; None if all of them are here. Others
                ignore it.
        """
        return None

    def columns(
        self, query: "Segment", num_blocks: int, tokens: Array | None = None,
        rows: Array | None = None,
    ) -> "Columns | None":
        """The gathered columns as the queries of one segment see them; None if there are none.

        Args:
            query: blocks of the queries.
            num_blocks: S / g.
            tokens: of an index `by_rows`, its `column_tokens`; None if it holds all rows. Others
                ignore it.
            rows: as in `shards`.
        """
        return None

    def within_documents(self, first: Array, end: Array, rows: Array | None = None) -> "Index":
        """The pairs of this index that do not join two documents, as an index of the same kind.

        Args:
            first: int32 [B, NB], for each block of the sequence the first block of its document; NB
                for a block of none, which then computes nothing.
            end: int32 [B, NB], one past the last block of the document; 0 for a block of none.
            rows: as in `shards`.

        Raises:
            NotImplementedError: this kind of index cannot write down what would be left of it.
        """
        raise NotImplementedError(
            f"a {type(self).__name__} cannot leave out the pairs that join two documents"
        )

    def budgets(self) -> dict[str, Array]:
        """How much the index lists of each kind of thing, by its name: int32 [B, Hq] each."""
        return {}

    def told_length(self) -> int | None:
        """S where the index itself tells it, else None; its arrays must not be traced."""
        return None


def check_whole_blocks(seq_len: int, block_size: int) -> None:
    """Raises ValueError unless a sequence is made of whole blocks."""
    if seq_len % block_size:
        raise ValueError(f"seq_len={seq_len} is not a multiple of block_size={block_size}")
