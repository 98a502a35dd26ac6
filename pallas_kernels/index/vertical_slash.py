"""Block diagonals and key columns."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.index.entries import contains, live, marked
from pallas_kernels.index.protocol import (
    Rows,
    Segment,
    TiledIndex,
    as_float,
    check_seq_len,
    check_whole_blocks,
    tile_pairs,
)
from pallas_kernels.index.toeplitz import ToeplitzShards
from pallas_kernels.tiles import Columns, DiagonalTiles, padded_columns
from pallas_kernels.tiles.tiles import at_least_one, check_shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VerticalSlashIndex(TiledIndex):
    """Block diagonals and key columns, per batch entry and query head.

    With g = `block_size` and global token positions q, k, a pair is computed iff `k <= q` and
    (`q//g - k//g` is one of the slash blocks, or `k` is one of the vertical tokens). It is a
    union: a pair that is in both counts once. Lists ascend; entries from the count on are padding.
    """

    slash_blocks: Array  # int32 [B, Hq, max_slash_blocks], distances; padding is S/g or more
    slash_count: Array  # int32 [B, Hq]
    vertical_tokens: Array  # int32 [B, Hq, max_verticals], key positions; padding is S or more
    vertical_count: Array  # int32 [B, Hq]
    block_size: int = jax.tree.static()  # g, tokens per block
    num_blocks: int | None = jax.tree.static(default=None)  # NB = S/g; None: any length

    causal = True

    def computed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        size = self.block_size
        main, far_tiles, blocks_below, own_rows = self._counts(seq_len)
        pairs = tile_pairs(as_float(far_tiles), as_float(main * (seq_len // size)), size)
        pairs += as_float(blocks_below.sum(-1, dtype=jnp.int32)) * size
        return pairs + as_float(own_rows.sum(-1, dtype=jnp.int32))

    def executed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        size = self.block_size
        main, far_tiles, blocks_below, own_rows = self._counts(seq_len)
        tiles = main * (seq_len // size) + far_tiles
        columns = (blocks_below + (own_rows > 0)).sum(-1, dtype=jnp.int32)
        return as_float(tiles) * size**2 + as_float(columns) * size

    def computes(self, query_positions: Array, key_blocks: Array) -> Array:
        size = self.block_size
        shape = query_positions.size, key_blocks.size
        distance = query_positions[:, None] // size - key_blocks
        by_block = contains(self.slash_blocks, self.slash_count, distance.reshape(-1))
        tokens = key_blocks[:, None] * size + jnp.arange(size, dtype=jnp.int32)
        by_column = contains(self.vertical_tokens, self.vertical_count, tokens.reshape(-1))
        by_block = by_block.reshape(*by_block.shape[:2], *shape, 1)
        return by_block | by_column.reshape(*by_column.shape[:2], 1, shape[1], size)

    def on_one_device(
        self, batch: int, num_queries: int, num_heads: int, num_keys: int
    ) -> tuple[DiagonalTiles, Columns | None]:
        check_seq_len(self, num_queries)
        check_shape("index.slash_count", self.slash_count, (batch, num_heads))
        check_shape("index.vertical_count", self.vertical_count, (batch, num_heads))
        num_blocks = num_queries // self.block_size
        tiles = DiagonalTiles(
            offsets=at_least_one(self.slash_blocks),
            start=jnp.zeros_like(self.slash_count),
            stop=self.slash_count,
            diagonal=jnp.int32(0),
            block_size=self.block_size,
        )
        return tiles, self.columns(Segment(0, 1, num_blocks), num_blocks)

    def shards(
        self, batch: int, num_heads: int, stride: int, num_blocks: int, rows: Array | None = None
    ) -> ToeplitzShards:
        check_seq_len(self, num_blocks * self.block_size)
        check_shape("index.slash_count", self.slash_count, (batch, num_heads))
        lists = at_least_one(self.slash_blocks), self.slash_count
        return ToeplitzShards.listed(*lists, stride, num_blocks, self.block_size)

    def column_tokens(self, every_row: Callable[[Array], Array] | None = None) -> Array | None:
        if self.vertical_tokens.shape[-1] == 0:
            return None
        return padded_columns(self.vertical_tokens, self.vertical_count)

    def columns(
        self,
        query: Segment,
        num_blocks: int,
        tokens: Array | None = None,
        rows: Array | None = None,
    ) -> Columns | None:
        tokens = self.column_tokens()
        if tokens is None:
            return None
        query_blocks = query.blocks()
        active = self.active_diagonals(num_blocks)
        column_blocks = jnp.minimum(tokens // self.block_size, num_blocks)
        distance = query_blocks[:, None] - column_blocks[..., None, :]  # [B, Hq, n, Mv]
        covered = jnp.take_along_axis(
            active[:, :, None, :], jnp.maximum(distance, 0), axis=-1, mode="clip"
        )
        return Columns.beside(covered, tokens, query_blocks, num_blocks, self.block_size)

    def budgets(self) -> dict[str, Array]:
        return {"columns": self.vertical_count, "diagonals": self.slash_count}

    def known_seq_len(self) -> int | None:
        return self.num_blocks and self.num_blocks * self.block_size

    def active_diagonals(self, num_blocks: int) -> Array:
        """Whether each block diagonal is computed: bool [B, Hq, num_blocks]."""
        return marked(self.slash_blocks, self.slash_count, num_blocks)

    def _counts(self, seq_len: int) -> tuple[Array, Array, Array, Array]:
        """Counts main diagonals and blocks on others [B, Hq]; blocks below and own rows by column.

        Blocks below a column count if no diagonal computes them, own rows if the column adds them.
        """
        size = self.block_size
        check_seq_len(self, seq_len)
        check_whole_blocks(seq_len, size)
        num_blocks = seq_len // size
        active = self.active_diagonals(num_blocks)
        far = active.at[..., 0].set(False)
        far_tiles = jnp.where(far, num_blocks - jnp.arange(num_blocks), 0).sum(-1, dtype=jnp.int32)
        # Entry i: number of inactive diagonals among 1..i.
        inactive = (~active).at[..., 0].set(False)
        inactive_up_to = jnp.cumsum(inactive, axis=-1, dtype=jnp.int32)
        valid = live(self.vertical_tokens, self.vertical_count)
        tokens = jnp.where(valid, self.vertical_tokens, 0)
        below = jnp.take_along_axis(inactive_up_to, num_blocks - 1 - tokens // size, axis=-1)
        own = jnp.where(active[..., :1], 0, size - tokens % size)
        return (
            active[..., 0].astype(jnp.int32),
            far_tiles,
            jnp.where(valid, below, 0),
            jnp.where(valid, own, 0),
        )
