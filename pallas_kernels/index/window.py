"""The index of a sliding window: the last tokens of each query's document."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.index.dense import DenseIndex
from pallas_kernels.index.protocol import Index, Rows, Segment, as_float, check_seq_len
from pallas_kernels.index.toeplitz import DocumentShards, ToeplitzShards
from pallas_kernels.tiles import DiagonalTiles
from pallas_kernels.tiles.tiles import check_shape

_PART = 14  # pair counts of rows are summed as two integers, so that sums are exact


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowIndex(Index):
    """Each query's own token and the `window` - 1 tokens before it, within its document.

    A pair (q, k) is computed iff q - window < k <= q and both are in one document.
    """

    documents: DenseIndex  # of whole sequences, with `first` and `end`
    window: int = jax.tree.static()  # W, tokens

    causal = True

    @classmethod
    def of_sequence(cls, batch: int, num_heads: int, num_blocks: int, size: int, window: int):
        """Returns the window in sequences of one document each, with blocks of `size` tokens."""
        first = jnp.zeros((batch, num_heads, num_blocks), jnp.int32)
        end = jnp.full_like(first, num_blocks)
        return cls(DenseIndex(size, first=first, end=end), window)

    @property
    def block_size(self) -> int:
        return self.documents.block_size

    @property
    def first(self) -> Array:
        """First block of each block's document, int32 [B, Hq, NB]; NB for none."""
        assert self.documents.first is not None
        return self.documents.first

    @property
    def end(self) -> Array:
        """One past the last block of each block's document, int32 [B, Hq, NB]; 0 for none."""
        assert self.documents.end is not None
        return self.documents.end

    @property
    def last(self) -> int:
        """The last block diagonal with a pair."""
        return (self.window + self.block_size - 2) // self.block_size

    def on_one_device(
        self, batch: int, num_queries: int, num_heads: int, num_keys: int
    ) -> tuple[DiagonalTiles, None]:
        """Returns the tiles of the queries of the last keys; the index is of the keys."""
        num_blocks = num_keys // self.block_size
        check_shape("index.first", self.first, (batch, num_heads, num_blocks))
        lag, count = num_blocks - num_queries // self.block_size, min(self.last + 1, num_blocks)
        offsets = jnp.arange(count, dtype=jnp.int32)
        lists = jnp.broadcast_to(offsets, (batch, num_heads, count))
        counts = jnp.full((batch, num_heads), count, jnp.int32)
        every = ToeplitzShards.listed(lists, counts, 1, num_blocks, self.block_size)
        shards = DocumentShards(every, self.first[:, :1], self.end[:, :1])
        queries, keys = Segment(lag, 1, num_blocks - lag), Segment(0, 1, num_blocks)
        return dataclasses.replace(shards.pair(queries, keys), window=self.window), None

    def within_documents(self, first: Array, end: Array, rows: Array | None = None) -> Self:
        within = self.documents.within_documents(first, end, rows)
        return dataclasses.replace(self, documents=within)

    def computed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        check_seq_len(self, seq_len)
        pairs = self.pairs_of_rows()
        high, low = (
            as_float(x.sum(-1, dtype=jnp.int32)) for x in (pairs >> _PART, pairs & (2**_PART - 1))
        )
        return high * 2**_PART + low

    def pairs_of_rows(self, rows: Rows | None = None) -> Array:
        size, window = self.block_size, self.window
        before = (self._tiles(rows) - 1) * size  # tokens of the document before the row of blocks
        # The first queries of a document see all tokens before them.
        growing = jnp.clip(window - before, 0, size)
        pairs = growing * before + growing * (growing + 1) // 2 + (size - growing) * window
        return jnp.where(before >= 0, pairs, 0)

    def executed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        check_seq_len(self, seq_len)
        tiles = jnp.minimum(self._tiles(None), self.last + 1)
        return as_float(tiles.sum(-1, dtype=jnp.int32)) * self.block_size**2

    def computes(self, query_positions: Array, key_blocks: Array) -> Array:
        size = self.block_size
        keys = key_blocks[:, None] * size + jnp.arange(size, dtype=jnp.int32)
        near = query_positions[:, None, None] - keys < self.window
        return near & self.documents.computes(query_positions, key_blocks)

    def known_seq_len(self) -> int:
        return self.first.shape[-1] * self.block_size

    def _tiles(self, rows: Rows | None) -> Array:
        """Counts the blocks of each row's document up to its own: int32 [B, Hq, n]."""
        blocks = jnp.arange(self.first.shape[-1], dtype=jnp.int32)
        blocks = blocks if rows is None else rows.blocks
        return jnp.maximum(blocks + 1 - self.first[:, :, blocks], 0)
