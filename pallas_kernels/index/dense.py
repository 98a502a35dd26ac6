"""The index of all pairs, or of all causal pairs within packed documents."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.index.protocol import (
    Rows,
    Segment,
    TiledIndex,
    as_float,
    check_seq_len,
    check_whole_blocks,
    tile_pairs,
)
from pallas_kernels.index.toeplitz import DocumentShards, ToeplitzShards
from pallas_kernels.tiles import DiagonalTiles
from pallas_kernels.tiles.tiles import check_shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseIndex(TiledIndex):
    """All causal pairs, or all pairs; with documents, all causal pairs of each. It has no lists.

    Documents consist of whole blocks, one after another, optionally with padding in between and at
    the end. `first` and `end` are equal for all heads; they have their axis to be sharded.
    """

    block_size: int = jax.tree.static()  # g
    causal: bool = jax.tree.static(default=True)
    first: Array | None = None  # int32 [B, Hq, NB], first block of each block's document, or NB
    end: Array | None = None  # int32 [B, Hq, NB], one past the last block of the document, or 0

    def within_documents(self, first: Array, end: Array, rows: Array | None = None) -> Self:
        if self.first is None or self.end is None:
            return super().within_documents(first, end, rows)
        first = jnp.maximum(self.first, first[:, None])
        end = jnp.minimum(self.end, end[:, None])
        none = first >= end
        return dataclasses.replace(
            self, first=jnp.where(none, first.shape[-1], first), end=jnp.where(none, 0, end)
        )

    def computed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        check_whole_blocks(seq_len, self.block_size)
        if self.first is None:
            return _one(seq_len * (seq_len + 1) // 2 if self.causal else seq_len**2)
        check_seq_len(self, seq_len)
        tiles = self._tiles(self.first)
        own = (tiles > 0).sum(-1, dtype=jnp.int32)
        whole = tiles.sum(-1, dtype=jnp.int32) - own
        return tile_pairs(as_float(whole), as_float(own), self.block_size)

    def pairs_of_rows(self, rows: Rows | None = None) -> Array | None:
        if self.first is None:
            return None
        tiles = self._tiles(self.first, None if rows is None else rows.blocks)
        own = (tiles > 0).astype(jnp.int32)
        return tile_pairs(tiles - own, own, self.block_size)

    def executed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        check_whole_blocks(seq_len, self.block_size)
        if self.first is None:
            blocks = seq_len // self.block_size
            tiles = blocks * (blocks + 1) // 2 if self.causal else blocks**2
            return _one(tiles * self.block_size**2)
        check_seq_len(self, seq_len)
        return as_float(self._tiles(self.first).sum(-1, dtype=jnp.int32)) * self.block_size**2

    def computes(self, query_positions: Array, key_blocks: Array) -> Array:
        if self.first is None or self.end is None:
            return jnp.ones((1, 1, query_positions.shape[0], key_blocks.shape[0], 1), bool)
        blocks = query_positions // self.block_size
        first, end = self.first[:, :, blocks, None], self.end[:, :, blocks, None]
        return ((key_blocks >= first) & (key_blocks < end))[..., None]

    def on_one_device(
        self, batch: int, num_queries: int, num_heads: int, num_keys: int
    ) -> tuple[DiagonalTiles, None]:
        g = self.block_size
        if self.first is None:
            sizes = batch, num_heads, num_queries // g, num_keys // g
            return DiagonalTiles.full(*sizes, g, self.causal), None
        every = Segment(0, 1, num_keys // g)
        return self.shards(batch, num_heads, 1, num_keys // g).pair(every, every), None

    def shards(
        self, batch: int, num_heads: int, stride: int, num_blocks: int, rows: Array | None = None
    ) -> ToeplitzShards | DocumentShards:
        every = ToeplitzShards.every(batch, num_heads, stride, num_blocks, self.block_size)
        if self.first is None or self.end is None:
            return every
        for name, x in (("first", self.first), ("end", self.end)):
            check_shape(f"index.{name}", x, (batch, num_heads, num_blocks))
        return DocumentShards(every, self.first[:, :1], self.end[:, :1])

    def known_seq_len(self) -> int | None:
        return None if self.first is None else self.first.shape[-1] * self.block_size

    def active_diagonals(self, num_blocks: int) -> Array:
        """Whether each block diagonal is computed, without documents: bool [1, 1, num_blocks]."""
        return jnp.ones((1, 1, num_blocks), bool)

    def _tiles(self, first: Array, blocks: Array | None = None) -> Array:
        """Counts the key blocks seen by rows of blocks: int32 [B, Hq, n]; None for all rows."""
        if blocks is None:
            blocks = jnp.arange(first.shape[-1], dtype=jnp.int32)
        return jnp.maximum(blocks + 1 - first[:, :, blocks], 0)


def _one(pairs: int) -> Array:
    return jnp.full((1, 1), float(pairs))
