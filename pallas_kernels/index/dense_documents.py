"""The index of all causal pairs within packed documents."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.index.protocol import Index, Rows, check_whole_blocks
from pallas_kernels.index.shards import Segment, ShardTiles
from pallas_kernels.index.toeplitz import ToeplitzShards
from pallas_kernels.tiles import DiagonalTiles, SegmentedDiagonals
from pallas_kernels.tiles.protocol import check_shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseDocumentsIndex(Index):
    """All causal pairs of each document: `DenseIndex` for packed sequences, also without lists.

    A pair (q, k) is computed iff k <= q and both are in one document. Documents consist of whole
    blocks, one after another, optionally with padding in between and at the end.

    Attributes:
        first: int32 [B, Hq, NB], first block of each block's document; NB for a block without one,
            which computes nothing. Equal for all heads; has their axis to be sharded.
        end: int32 [B, Hq, NB], one past the last block of the document; 0 without a document.
        block_size: g (static).
    """

    first: Array
    end: Array
    block_size: int = jax.tree.static()

    causal = True

    def within_documents(
        self, first: Array, end: Array, rows: Array | None = None
    ) -> "DenseDocumentsIndex":
        first = jnp.maximum(self.first, first[:, None])
        end = jnp.minimum(self.end, end[:, None])
        none = first >= end
        return dataclasses.replace(
            self, first=jnp.where(none, first.shape[-1], first), end=jnp.where(none, 0, end)
        )

    def computed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        size, to_float = self.block_size, jnp.result_type(float)
        tiles, own = self._counts(seq_len)
        pairs = (tiles - own).astype(to_float) * size**2
        return pairs + own.astype(to_float) * (size * (size + 1) // 2)

    def pairs_of_rows(self, rows: Rows | None = None) -> Array:
        size, blocks = self.block_size, None if rows is None else rows.blocks
        tiles = self._tiles(blocks)
        own = (tiles > 0).astype(jnp.int32)
        return (tiles - own) * size**2 + own * (size * (size + 1) // 2)

    def executed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        tiles, _ = self._counts(seq_len)
        return tiles.astype(jnp.result_type(float)) * self.block_size**2

    def computes(self, query_positions: Array, key_blocks: Array) -> Array:
        blocks = query_positions // self.block_size
        first, end = self.first[:, :, blocks, None], self.end[:, :, blocks, None]
        return ((key_blocks >= first) & (key_blocks < end))[..., None]

    def on_one_device(
        self, batch: int, num_queries: int, num_heads: int, num_keys: int
    ) -> tuple[DiagonalTiles, None]:
        num_blocks = num_keys // self.block_size
        every = Segment(0, 1, num_blocks)
        return self.shards(batch, num_heads, 1, num_blocks).pair(every, every), None

    def shards(
        self, batch: int, num_heads: int, stride: int, num_blocks: int, rows: Array | None = None
    ) -> "DocumentShards":
        for name in ("first", "end"):
            check_shape(f"index.{name}", getattr(self, name), (batch, num_heads, num_blocks))
        every = ToeplitzShards.every(batch, num_heads, stride, num_blocks, self.block_size)
        return DocumentShards(every, self.first[:, :1], self.end[:, :1])

    def told_length(self) -> int:
        return self.first.shape[-1] * self.block_size

    def _tiles(self, blocks: Array | None = None) -> Array:
        """Counts the key blocks seen by rows of blocks: int32 [B, Hq, n]; None for all rows."""
        if blocks is None:
            blocks = jnp.arange(self.first.shape[-1], dtype=jnp.int32)
        return jnp.maximum(blocks + 1 - self.first[:, :, blocks], 0)

    def _counts(self, seq_len: int) -> tuple[Array, Array]:
        """Counts tiles, and those of them on the diagonal: int32 [B, Hq] each."""
        check_whole_blocks(seq_len, self.block_size)
        if seq_len != self.told_length():
            raise ValueError(f"seq_len={seq_len}, but the index has {self.told_length()} tokens")
        tiles = self._tiles()
        return tiles.sum(-1, dtype=jnp.int32), (tiles > 0).sum(-1, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class DocumentShards(ShardTiles):
    """All block diagonals, each block restricted to its document."""

    every: ToeplitzShards  # all diagonals of the sequence
    first: Array  # int32 [B, 1, NB], as in `DenseDocumentsIndex`
    end: Array

    def pair(self, query: Segment, key: Segment) -> DiagonalTiles:
        first = self._first_keys(query, key.first_block)
        end = self._end_queries(query.first_block, key.blocks())
        tiles = self.every.pair(query, key)
        return dataclasses.replace(tiles, first_keys=first, end_queries=end)

    def gathered(self, query: Segment, keys: Array, skip_own: bool) -> SegmentedDiagonals:
        tiles = self.every.gathered(query, keys, skip_own)
        starts = keys[tiles.segment][:, None]
        steps = self.every.stride * jnp.arange(query.num_blocks, dtype=jnp.int32)
        first = self._first_keys(query, starts)
        end = self._end_queries(query.first_block, starts + steps)
        return dataclasses.replace(tiles, first_keys=first, end_queries=end)

    def _first_keys(self, query: Segment, start: int | Array) -> Array:
        """Returns the first keys that rows see, as positions among those starting at `start`."""
        first = self.first[..., query.blocks()]
        if jnp.ndim(start):
            first = first[:, :, None]
        return -((start - first) // self.every.stride)

    def _end_queries(self, start: int | Array, blocks: Array) -> Array:
        """Returns one past the last rows that see key blocks, as positions from `start` on."""
        return -((start - self.end[..., blocks]) // self.every.stride)
