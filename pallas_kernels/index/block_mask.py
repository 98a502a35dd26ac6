"""One bit per pair of query block and key block, and optional key columns."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.index import bits as sets
from pallas_kernels.index.entries import marked
from pallas_kernels.index.protocol import (
    Rows,
    Segment,
    ShardTiles,
    TiledIndex,
    as_float,
    check_seq_len,
    rows_or_all,
    tile_pairs,
)
from pallas_kernels.tiles import NO_DIAGONAL, Columns, ListedTiles, padded_columns
from pallas_kernels.tiles.tiles import check_shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockMaskIndex(TiledIndex):
    """Key blocks of each query block as bits, compact enough to be saved for the backward pass.

    A pair (q, k) is computed iff k <= q and either the bit of key block k//g is set in the row of
    q//g, or key k is a column in a block from the row's `column_start` on; in both, it counts once.
    No bit above the diagonal is set. In a ring each rank holds its own rows.
    """

    # uint32 [B, Hq, rows, ceil(NB/32)]; bit b % 32 of word b // 32 is key block b; from NB on 0.
    bits: Array
    num_blocks: int = jax.tree.static()  # NB, blocks of the whole sequence
    block_size: int = jax.tree.static()  # g
    # uint32 [B, Hq, rows, ceil(g/32)], bits of the columns in each row's own block.
    column_marks: Array | None = None
    max_columns: int = jax.tree.static(default=0)  # of a head
    # int32 [B, Hq, rows], first block with columns that a row sees, such as the first of its
    # document; at most the row itself if its block has columns. None for 0.
    column_start: Array | None = None

    causal = True
    sharded_by_query: ClassVar[bool] = True

    @classmethod
    @jax.numpy_rank_promotion("allow")
    def from_block_mask(cls, mask: Array, block_size: int, rows: Array | None = None) -> Self:
        """Builds the index from bool [B, Hq, rows, NB]; drops blocks above the diagonal.

        `rows`, int32 [rows], is the global block number of each row; None for 0, 1, ...
        """
        if rows is None:
            rows = jnp.arange(mask.shape[-2], dtype=jnp.int32)
        if mask.dtype != bool or mask.ndim != 4 or mask.shape[2:3] != rows.shape:
            raise ValueError(
                f"mask is {mask.dtype} {list(mask.shape)}; expected bool [batch, heads, "
                f"{rows.size}, key blocks], with one row for each of `rows`"
            )
        num_blocks = mask.shape[-1]
        seen = jnp.arange(num_blocks, dtype=jnp.int32) <= rows[:, None]
        return cls(sets.pack(mask & seen), num_blocks, block_size)

    @jax.numpy_rank_promotion("allow")
    def with_columns(self, tokens: Array, rows: Array | None = None) -> Self:
        """Returns a copy with these columns, which every later row sees, instead of its own.

        `tokens`, int32 [B, Hq, C], are global positions in any order, or padding outside of the
        sequence. `rows`, int32 [rows], is the block number of each row.
        """
        if tokens.ndim != 3 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"tokens is {tokens.dtype} {list(tokens.shape)}; expected integers [batch, heads, "
                "columns]"
            )
        seq_len = self.known_seq_len()
        tokens = jnp.where((tokens >= 0) & (tokens < seq_len), tokens, seq_len)
        every = marked(tokens, jnp.full(tokens.shape[:-1], tokens.shape[-1]), seq_len)
        every = every.reshape(*tokens.shape[:-1], self.num_blocks, self.block_size)
        own = every if rows is None else every[:, :, rows]
        return dataclasses.replace(
            self, column_marks=sets.pack(own), max_columns=tokens.shape[-1], column_start=None
        )

    def columns_from(self, start: Array) -> Self:
        """Returns a copy without columns before each row's `start`, int32 [B, Hq, rows]."""
        if self.column_marks is None:
            return self
        start = jnp.broadcast_to(start, self.bits.shape[:-1]).astype(jnp.int32)
        if self.column_start is not None:
            start = jnp.maximum(start, self.column_start)
        return dataclasses.replace(self, column_start=start)

    def within_documents(self, first: Array, end: Array, rows: Array | None = None) -> Self:
        del end  # no bit is set above the diagonal, so none in a later document
        rows = jnp.arange(self.num_blocks, dtype=jnp.int32) if rows is None else rows
        first = first[:, None, rows]
        own = sets.ranges(first, rows, self.num_blocks)
        return dataclasses.replace(self.columns_from(first), bits=self.bits & own)

    def computed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        size = self.block_size
        tiles, cut = self._tiles(seq_len, rows)
        pairs = tile_pairs(as_float(tiles - cut), as_float(cut), size)
        if self.column_marks is None:
            return pairs
        below, own, _ = self._beside_blocks(rows)
        return pairs + as_float(below) * size + as_float(own)

    def pairs_of_rows(self, rows: Rows | None = None) -> Array:
        own = self._own_listed(self._rows(rows)).astype(jnp.int32)
        pairs = tile_pairs(sets.count(self.bits) - own, own, self.block_size)
        if self.column_marks is None:
            return pairs
        below, in_own_row, _ = self._beside_blocks(rows, by_row=True)
        return pairs + below * self.block_size + in_own_row

    def executed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        pairs = as_float(self._tiles(seq_len, rows)[0]) * self.block_size**2
        if self.column_marks is None:
            return pairs
        below, _, in_own = self._beside_blocks(rows)
        return pairs + as_float(below + in_own) * self.block_size

    def computes(self, query_positions: Array, key_blocks: Array) -> Array:
        query_bits = self.bits[:, :, query_positions // self.block_size]
        by_block = sets.contains(query_bits, key_blocks)[..., None]
        if self.column_marks is None:
            return by_block
        columns = jnp.take(self._marked(), key_blocks, axis=2, mode="fill", fill_value=False)
        columns = columns[:, :, None]
        if self.column_start is not None:
            start = self.column_start[:, :, query_positions // self.block_size]
            columns &= (key_blocks >= start[..., None])[..., None]
        return by_block | columns

    def on_one_device(
        self, batch: int, num_queries: int, num_heads: int, num_keys: int
    ) -> tuple[ListedTiles, Columns | None]:
        self._check(batch, num_heads, num_queries // self.block_size, num_keys // self.block_size)
        tiles = _tiles_of(self.bits, self.num_blocks, jnp.int32(0), self.block_size)
        return tiles, self.columns(Segment(0, 1, self.num_blocks), self.num_blocks)

    def shards(
        self, batch: int, num_heads: int, stride: int, num_blocks: int, rows: Array | None = None
    ) -> ShardTiles:
        count = num_blocks if rows is None else rows.shape[0]
        self._check(batch, num_heads, count, num_blocks)
        return MaskShards(self.bits, rows, num_blocks, self.block_size)

    def column_tokens(self, every_row: Callable[[Array], Array] | None = None) -> Array | None:
        if self.column_marks is None:
            return None
        marks = self._marked()
        marks = marks if every_row is None else every_row(marks)
        words = sets.pack(marks.reshape(*marks.shape[:2], -1))
        tokens, count = sets.listed(words, self.max_columns)
        return padded_columns(tokens, count)

    def columns(
        self,
        query: Segment,
        num_blocks: int,
        tokens: Array | None = None,
        rows: Array | None = None,
    ) -> Columns | None:
        tokens = self.column_tokens() if tokens is None else tokens
        if self.column_marks is None or tokens is None:
            return None
        shards = MaskShards(self.bits, rows, num_blocks, self.block_size)
        bits = shards.rows_of(query)
        blocks = jnp.minimum(tokens // self.block_size, num_blocks - 1)
        word = jnp.take_along_axis(bits, (blocks // sets.WORD)[:, :, None], axis=-1)
        listed = (word >> (blocks % sets.WORD).astype(jnp.uint32)[:, :, None]) & 1
        left_out = listed.astype(bool)
        if self.column_start is not None:
            start = shards.rows_of(query, self.column_start)
            left_out |= blocks[:, :, None] < start[..., None]
        apart = self.column_start is not None
        return Columns.beside(left_out, tokens, query.blocks(), num_blocks, self.block_size, apart)

    def budgets(self) -> dict[str, Array]:
        blocks = {"blocks": sets.count(self.bits).sum(-1, dtype=jnp.int32)}
        if self.column_marks is None:
            return blocks
        return blocks | {"columns": sets.count(self.column_marks).sum(-1, dtype=jnp.int32)}

    def known_seq_len(self) -> int:
        return self.num_blocks * self.block_size

    def _check(self, batch: int, num_heads: int, rows: int, num_blocks: int) -> None:
        if num_blocks != self.num_blocks:
            raise ValueError(
                f"index.num_blocks={self.num_blocks} but there are {num_blocks} key blocks"
            )
        words = sets.words_for(num_blocks)
        check_shape("index.bits", self.bits, (batch, num_heads, rows, words))
        if self.column_marks is not None:
            words = sets.words_for(self.block_size)
            check_shape("index.column_marks", self.column_marks, (batch, num_heads, rows, words))
        if self.column_start is not None:
            check_shape("index.column_start", self.column_start, (batch, num_heads, rows))

    def _tiles(self, seq_len: int, rows: Rows | None) -> tuple[Array, Array]:
        """Counts set blocks, and those of them that are a row's own: int32 [B, Hq] each."""
        check_seq_len(self, seq_len)
        rows = self._rows(rows)
        tiles = sets.count(self.bits).sum(-1, dtype=jnp.int32)
        return rows.total(tiles), rows.total(self._own_listed(rows).sum(-1, dtype=jnp.int32))

    def _beside_blocks(self, rows: Rows | None, by_row: bool = False) -> tuple[Array, Array, Array]:
        """Counts what columns add to the set blocks, int32 [B, Hq] or, `by_row`, [B, Hq, rows]."""
        rows, marks = self._rows(rows), self._marked()
        columns_per_row = marks.sum(-1, dtype=jnp.int32)
        counts = jnp.zeros((*columns_per_row.shape[:2], self.num_blocks), jnp.int32)
        counts = rows.total(counts.at[:, :, rows.blocks].set(columns_per_row))
        blocks = jnp.arange(self.num_blocks, dtype=jnp.int32)
        # (Column, later row of blocks that sees it without its block) pairs; token pairs of columns
        # in own blocks that are not set; columns in such blocks.
        free = (blocks < rows.blocks[:, None]) & ~sets.unpack(self.bits, self.num_blocks)
        if self.column_start is not None:
            free &= blocks >= self.column_start[..., None]
        over = -1 if by_row else (-2, -1)
        below = jnp.where(free, counts[:, :, None], 0).sum(over, dtype=jnp.int32)
        unlisted = ~self._own_listed(rows)
        later = self.block_size - jnp.arange(self.block_size, dtype=jnp.int32)
        own = jnp.where(unlisted[..., None] & marks, later, 0).sum(over, dtype=jnp.int32)
        in_own = jnp.where(unlisted, columns_per_row, 0)
        if by_row:
            return below, own, in_own
        return rows.total((below, own, in_own.sum(-1, dtype=jnp.int32)))

    def _own_listed(self, rows: Rows) -> Array:
        own = sets.single(rows.blocks, self.bits.shape[-1])
        return ((self.bits & own) != 0).any(-1)

    def _rows(self, rows: Rows | None) -> Rows:
        return rows_or_all(rows, self.bits.shape[-2])

    def _marked(self) -> Array:
        """The columns of each row's own block: bool [B, Hq, rows, g]."""
        assert self.column_marks is not None
        return sets.unpack(self.column_marks, self.block_size)


@dataclasses.dataclass(frozen=True)
class MaskShards(ShardTiles):
    """Block lists of shards, from the bits of the rows that one rank holds."""

    bits: Array  # uint32 [B, Hq, n, ceil(NB/32)], as in `BlockMaskIndex`
    rows: Array | None  # int32 [n], global block number of each row; None for 0 .. NB - 1
    num_blocks: int  # NB
    block_size: int

    def pair(self, query: Segment, key: Segment) -> ListedTiles:
        lag = jnp.asarray(query.first_block - key.first_block, jnp.int32)
        diagonal = jnp.where(lag % query.stride == 0, -(lag // query.stride), NO_DIAGONAL)
        # Keys ascend, and none after the masked one is listed: it is the last of its list.
        words = sets.pack(sets.contains(self.rows_of(query), key.blocks()))
        return _tiles_of(words, key.num_blocks, diagonal, self.block_size)

    def gathered(self, query: Segment, keys: Array, skip_own: bool) -> ListedTiles:
        size = query.num_blocks
        steps = query.stride * jnp.arange(size, dtype=jnp.int32)
        blocks = (keys[:, None] + steps).reshape(-1).astype(jnp.int32)
        own = keys == query.first_block
        words = sets.contains(self.rows_of(query), blocks)
        if skip_own:
            words = sets.pack(words & ~jnp.repeat(own, size))
            return _tiles_of(words, blocks.size, jnp.asarray(NO_DIAGONAL), self.block_size)
        offset = -jnp.argmax(own).astype(jnp.int32) * size
        diagonal = jnp.where(own.any(), offset, NO_DIAGONAL)
        last = jnp.where(own.any(), jnp.arange(size, dtype=jnp.int32) - offset, -1)
        return _tiles_of(sets.pack(words), blocks.size, diagonal, self.block_size, last)

    def rows_of(self, query: Segment, of: Array | None = None) -> Array:
        """Selects the rows of a segment, of the bits or of an array [B, Hq, n, ...]."""
        of = self.bits if of is None else of
        if self.rows is None:
            return of[:, :, query.blocks()]
        if self.rows.shape[0] == query.num_blocks:  # the rank has a single segment
            return of
        places = jnp.arange(self.rows.shape[0], dtype=jnp.int32)
        where = jnp.zeros(self.num_blocks, jnp.int32).at[self.rows].set(places)
        return of[:, :, where[query.blocks()]]


def _tiles_of(
    words: Array, num_keys: int, diagonal: Array, block_size: int, last: Array | None = None
) -> ListedTiles:
    """Builds the lists of rows of bits, uint32 [B, Hq, n, ceil(num_keys/32)], and their transpose.

    `last`, int32 [n], is the key block to move to the end of its list, or -1; None for no moves.
    """
    columns, column_count = sets.listed(sets.transpose(words, num_keys), words.shape[-2])
    if last is None:
        rows, row_count = sets.listed(words, num_keys)
        return ListedTiles(rows, row_count, columns, column_count, diagonal, block_size)
    own = sets.single(last, words.shape[-1])
    listed = (words & own).any(-1)
    rows, others = sets.listed(words & ~own, num_keys)
    slots = jnp.arange(num_keys, dtype=jnp.int32)
    at_end = listed[..., None] & (slots == others[..., None])
    rows = jnp.where(at_end, last[:, None], rows)
    return ListedTiles(rows, others + listed, columns, column_count, diagonal, block_size)
