"""Block lists of any shape: tiles of one shard of queries and the keys of one call."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.tiles.protocol import Lists, Tiles, check_lists, check_shape


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
