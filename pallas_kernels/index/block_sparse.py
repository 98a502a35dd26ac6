"""Lists of key blocks per query block."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.index import bits
from pallas_kernels.index.block_mask import MaskShards
from pallas_kernels.index.entries import contains, live, marked
from pallas_kernels.index.protocol import Rows, TiledIndex, as_float, check_seq_len, tile_pairs
from pallas_kernels.tiles import NO_DIAGONAL, ListedTiles
from pallas_kernels.tiles.tiles import at_least_one, check_shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockSparseIndex(TiledIndex):
    """Lists of key blocks per query block and their transpose, for patterns of any shape.

    A pair (q, k) is computed iff `k//g` is listed for `q//g` and (`k <= q` or not `causal`).
    Lists ascend without duplicates. With `causal`, no listed block is entirely above the diagonal.
    Entries from a count on are arbitrary padding.
    """

    key_blocks: Array  # int32 [B, Hq, Sq/g, max_row], key blocks of each query block
    key_count: Array  # int32 [B, Hq, Sq/g]
    query_blocks: Array  # int32 [B, Hq, Sk/g, max_col], query blocks of each key block
    query_count: Array  # int32 [B, Hq, Sk/g]
    block_size: int = jax.tree.static()  # g
    causal: bool = jax.tree.static(default=True)  # whether the element mask `k <= q` applies

    @classmethod
    @jax.numpy_rank_promotion("allow")
    def from_block_mask(cls, mask: Array, block_size: int, causal: bool = True) -> Self:
        """Builds the lists from bool [B, Hq, Sq/g, Sk/g]; drops blocks above a causal diagonal."""
        if causal:
            rows = jnp.arange(mask.shape[-2])[:, None]
            mask = mask & (jnp.arange(mask.shape[-1])[None, :] <= rows)
        key_blocks, key_count = _compact(mask)
        query_blocks, query_count = _compact(jnp.swapaxes(mask, -1, -2))
        return cls(key_blocks, key_count, query_blocks, query_count, block_size, causal)

    def computed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        tiles = self._tiles(seq_len)
        if not self.causal:
            return as_float(tiles) * self.block_size**2
        own = jnp.arange(self.key_count.shape[-1], dtype=jnp.int32)[:, None]
        valid = live(self.key_blocks, self.key_count)
        cut = ((self.key_blocks == own) & valid).sum((-1, -2), dtype=jnp.int32)
        return tile_pairs(as_float(tiles - cut), as_float(cut), self.block_size)

    def executed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        return as_float(self._tiles(seq_len)) * self.block_size**2

    def computes(self, query_positions: Array, key_blocks: Array) -> Array:
        rows = query_positions // self.block_size
        lists, counts = self.key_blocks[:, :, rows], self.key_count[:, :, rows]
        return contains(lists, counts, key_blocks)[..., None]

    def on_one_device(
        self, batch: int, num_queries: int, num_heads: int, num_keys: int
    ) -> tuple[ListedTiles, None]:
        return self.tiles(), None

    def tiles(self) -> ListedTiles:
        # Ascending lists already have the order of `ListedTiles`: no key block of a row follows
        # the masked one.
        return ListedTiles(
            at_least_one(self.key_blocks),
            self.key_count,
            at_least_one(self.query_blocks),
            self.query_count,
            jnp.int32(0) if self.causal else jnp.asarray(NO_DIAGONAL),
            self.block_size,
        )

    def shards(
        self, batch: int, num_heads: int, stride: int, num_blocks: int, rows: Array | None = None
    ) -> MaskShards:
        check_shape("index.key_count", self.key_count, (batch, num_heads, num_blocks))
        lists, counts = self.key_blocks, self.key_count
        if rows is not None:
            lists, counts = lists[:, :, rows], counts[:, :, rows]
        words = bits.pack(marked(lists, counts, num_blocks))
        return MaskShards(words, rows, num_blocks, self.block_size)

    def budgets(self) -> dict[str, Array]:
        return {"blocks": self.key_count.sum(-1, dtype=jnp.int32)}

    def known_seq_len(self) -> int:
        return self.key_count.shape[-1] * self.block_size

    def _tiles(self, seq_len: int) -> Array:
        check_seq_len(self, seq_len)
        return self.key_count.sum(-1, dtype=jnp.int32)


def _compact(mask: Array) -> tuple[Array, Array]:
    """Lists the positions of true entries of the last axis, ascending, padded with its length."""
    size = mask.shape[-1]
    positions = jnp.where(mask, jnp.arange(size, dtype=jnp.int32), size)
    return jnp.sort(positions, axis=-1), mask.sum(-1, dtype=jnp.int32)
