"""Key chunks for each single query, which block lists cannot express."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.index import bits as sets
from pallas_kernels.index.block_mask import BlockMaskIndex
from pallas_kernels.index.protocol import (
    Index,
    Rows,
    as_float,
    check_seq_len,
    rows_or_all,
    tile_pairs,
)
from pallas_kernels.tiles.tiles import check_shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenChunksIndex(Index):
    """Key chunks of each query, as bits, which tiles cannot express: adjacent queries differ.

    A pair (q, k) is computed iff k <= q and query q selects the chunk of key k. Every query selects
    its own chunk, and no later one. In packed sequences, chunks start at document boundaries, and
    queries select chunks of their own document. A chunk has number `first block // chunk_blocks`.
    """

    # uint32 [B, Hq, rows, g, ceil(NC/32)]; bit c of the words of query i of a row of blocks is
    # whether it sees chunk c. NC = ceil(NB / `chunk_blocks`).
    chosen: Array
    num_blocks: int = jax.tree.static()  # NB, blocks of the whole sequence
    chunk_blocks: int = jax.tree.static()  # blocks per chunk
    most: int = jax.tree.static()  # maximum number of chunks per query, including its own
    block_size: int = jax.tree.static()  # g
    # int32 [B, Hq, rows], first block of each row's document, or NB if it has none. Equal for all
    # heads; has their axis to be sharded. None: no documents.
    first: Array | None = None

    causal = True
    sharded_by_query: ClassVar[bool] = True

    @property
    def num_chunks(self) -> int:
        return -(-self.num_blocks // self.chunk_blocks)

    def past(self, rows: Array) -> Array:
        """Returns `chosen` without each query's own chunk; `rows` are global block numbers."""
        own = sets.single(chunks_of(self.first, rows, self.chunk_blocks), self.chosen.shape[-1])
        return self.chosen & ~own[..., None, :]

    def starts(self, rows: Array) -> Array:
        """Returns the `chunk_starts` of past chunks of these rows, int32 [B or 1, 1, NC]."""
        first = None if self.first is None else self.first[:, :1]
        return chunk_starts(first, rows, self.num_blocks, self.chunk_blocks)

    def own(self, rows: Array) -> BlockMaskIndex:
        whole, cut = self._own_tiles_of(rows)
        start = jnp.where(cut > 0, rows - whole, self.num_blocks)
        bits = sets.ranges(start, rows, self.num_blocks)
        bits = jnp.broadcast_to(bits, (*self.chosen.shape[:3], bits.shape[-1]))
        return BlockMaskIndex(bits, self.num_blocks, self.block_size)

    def computed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        check_seq_len(self, seq_len)
        rows, size = self._rows(rows), self.block_size
        past = rows.total(self._past_counts(rows).sum(-1, dtype=jnp.int32))
        whole, cut = self._own_tiles(rows)
        own = tile_pairs(as_float(whole), as_float(cut), size)
        return as_float(past) * (self.chunk_blocks * size) + own

    def pairs_of_rows(self, rows: Rows | None = None) -> Array:
        size, numbers = self.block_size, self._rows(rows).blocks
        past = sets.count(self.past(numbers)).sum(-1, dtype=jnp.int32)
        own = tile_pairs(*self._own_tiles_of(numbers), size)
        return past * (self.chunk_blocks * size) + own

    def executed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        check_seq_len(self, seq_len)
        rows = self._rows(rows)
        tiles = (-(-self._past_counts(rows) // self.block_size)).sum(-1, dtype=jnp.int32)
        whole, cut = self._own_tiles(rows)
        tiles = as_float(rows.total(tiles)) * self.chunk_blocks + whole + cut
        return tiles * self.block_size**2

    def computes(self, query_positions: Array, key_blocks: Array) -> Array:
        size = self.block_size
        rows = query_positions // size
        query_bits = self.chosen[:, :, rows, query_positions % size]
        if self.first is None:
            return sets.contains(query_bits, key_blocks // self.chunk_blocks)[..., None]
        first = self.first[:, :, rows, None]
        chunks = chunks_of(first, key_blocks, self.chunk_blocks)
        words = jnp.clip(chunks // sets.WORD, 0, query_bits.shape[-1] - 1)
        place = (chunks % sets.WORD).astype(jnp.uint32)
        bit = (jnp.take_along_axis(query_bits, words, axis=-1) >> place) & 1
        return ((key_blocks >= first) & bit.astype(bool))[..., None]

    def budgets(self) -> dict[str, Array]:
        return {"chunks": sets.count(self.chosen).sum((-2, -1), dtype=jnp.int32)}

    def known_seq_len(self) -> int:
        return self.num_blocks * self.block_size

    def check(self, batch: int, num_heads: int, rows: int) -> None:
        words = sets.words_for(self.num_chunks)
        check_shape("index.chosen", self.chosen, (batch, num_heads, rows, self.block_size, words))
        if self.first is not None:
            check_shape("index.first", self.first, (batch, num_heads, rows))

    def _rows(self, rows: Rows | None) -> Rows:
        return rows_or_all(rows, self.chosen.shape[2])

    def _past_counts(self, rows: Rows) -> Array:
        """Counts the local queries that see each chunk as a past one: int32 [B, Hq, NC]."""
        marked = sets.unpack(self.past(rows.blocks), self.num_chunks)
        return marked.sum((2, 3), dtype=jnp.int32)

    def _own_tiles(self, rows: Rows) -> tuple[Array, Array]:
        """Counts blocks of own chunks that all rows see in full, and in part: [B, Hq] or []."""
        if self.first is None:
            whole, cut = self._own_tiles_of(jnp.arange(self.num_blocks, dtype=jnp.int32))
            return whole.sum(dtype=jnp.int32), cut.sum(dtype=jnp.int32)
        whole, cut = self._own_tiles_of(rows.blocks)
        return rows.total((whole.sum(-1, dtype=jnp.int32), cut.sum(-1, dtype=jnp.int32)))

    def _own_tiles_of(self, numbers: Array) -> tuple[Array, Array]:
        if self.first is None:
            return numbers % self.chunk_blocks, jnp.ones_like(numbers)
        inside = self.first < self.num_blocks
        whole = jnp.where(inside, (numbers - self.first) % self.chunk_blocks, 0)
        return whole, inside.astype(jnp.int32)


def chunks_of(first: Array | None, blocks: Array, chunk_blocks: int) -> Array:
    """Returns the chunk number of each block; `first` is the first one of its document, or None."""
    return (blocks if first is None else blocks - first % chunk_blocks) // chunk_blocks


def chunk_starts(first: Array | None, rows: Array, num_blocks: int, chunk_blocks: int) -> Array:
    """Returns the first block of each chunk that is complete before a row of its document.

    int32 [..., NC], or [1, 1, NC] if `first` is None (no documents); NB if it precedes no row.
    """
    numbers = jnp.arange(-(-num_blocks // chunk_blocks), dtype=jnp.int32)
    if first is None:
        return (numbers * chunk_blocks)[None, None]
    begin, own = first // chunk_blocks, chunks_of(first, rows, chunk_blocks)
    past = (numbers >= begin[..., None]) & (numbers < own[..., None])
    past &= (first < num_blocks)[..., None]
    start = numbers * chunk_blocks + (first % chunk_blocks)[..., None]
    return jnp.where(past, start, num_blocks).min(-2)
