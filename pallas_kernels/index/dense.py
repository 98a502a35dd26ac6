"""The index of all pairs."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.index.protocol import Index, Rows, check_whole_blocks
from pallas_kernels.index.toeplitz import ToeplitzShards
from pallas_kernels.tiles import DiagonalTiles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseIndex(Index):
    """All causal pairs, or all pairs, of every batch entry and head. It has no arrays."""

    block_size: int = jax.tree.static()
    causal: bool = jax.tree.static(default=True)

    def computed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        check_whole_blocks(seq_len, self.block_size)
        return _one(seq_len * (seq_len + 1) // 2 if self.causal else seq_len**2)

    def executed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        check_whole_blocks(seq_len, self.block_size)
        blocks = seq_len // self.block_size
        tiles = blocks * (blocks + 1) // 2 if self.causal else blocks**2
        return _one(tiles * self.block_size**2)

    def computes(self, query_positions: Array, key_blocks: Array) -> Array:
        return jnp.ones((1, 1, query_positions.shape[0], key_blocks.shape[0], 1), bool)

    def on_one_device(
        self, batch: int, num_queries: int, num_heads: int, num_keys: int
    ) -> tuple[DiagonalTiles, None]:
        g = self.block_size
        sizes = batch, num_heads, num_queries // g, num_keys // g
        return DiagonalTiles.full(*sizes, g, self.causal), None

    def shards(
        self, batch: int, num_heads: int, stride: int, num_blocks: int, rows: Array | None = None
    ) -> ToeplitzShards:
        return ToeplitzShards.every(batch, num_heads, stride, num_blocks, self.block_size)

    def active_diagonals(self, num_blocks: int) -> Array:
        return jnp.ones((1, 1, num_blocks), bool)


def _one(pairs: int) -> Array:
    return jnp.full((1, 1), float(pairs))
