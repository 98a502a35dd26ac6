"""One bit for each block of queries and keys."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.index import bits as sets
from pallas_kernels.index.mask_shards import MaskShards, tiles_of
from pallas_kernels.index.protocol import Index, Rows
from pallas_kernels.tiles import ListedTiles
from pallas_kernels.tiles.protocol import check_shape


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["bits"],
    meta_fields=["num_blocks", "block_size"],
)
@dataclasses.dataclass(frozen=True)
class BlockMaskIndex(Index):
    """Which key blocks each block of queries sees, as bits: small enough to be kept.

    A pair (q, k) is computed iff k <= q and the bit of key block k//g is set in the row of q//g.
    No bit above the diagonal is set. There is no capacity that a row could exceed. Lists for
    kernels are made from the bits when they are needed, and take 32 times the room each.

    Rows are those of the whole sequence, in its order; in a ring each rank holds its own
    (`Index.by_rows`).

    Attributes:
        bits: uint32 [B, Hq, rows, ceil(NB/32)]; bit b % 32 of word b // 32 is key block b, counted
            in the whole sequence. Bits from NB on are 0.
        num_blocks: NB, blocks of the whole sequence (static).
        block_size: g (static).
    """

    bits: Array
    num_blocks: int
    block_size: int

    causal = True
    by_rows: ClassVar[bool] = True
    key_shards_apart: ClassVar[bool] = False  # a list may lie in the keys of any one rank

    @classmethod
    def from_block_mask(
        cls, mask: Array, block_size: int, rows: Array | None = None
    ) -> "BlockMaskIndex":
        """The index of a boolean block mask.

        Args:
            mask: bool [B, Hq, rows, NB]; blocks above the diagonal are dropped.
            block_size: g.
            rows: int32 [rows], global block number of each row; None for 0, 1, ...
        """
        if rows is None:
            rows = jnp.arange(mask.shape[-2], dtype=jnp.int32)
        num_blocks = mask.shape[-1]
        seen = jnp.arange(num_blocks, dtype=jnp.int32) <= rows[:, None]
        return cls(sets.pack(mask & seen), num_blocks, block_size)

    def computed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        """As `Index.computed_pairs`: float [B, Hq]."""
        size, to_float = self.block_size, jnp.result_type(float)
        tiles = self._tiles(seq_len, rows)
        numbers = jnp.arange(self.bits.shape[-2], dtype=jnp.int32) if rows is None else rows.blocks
        own = sets.single(numbers, self.bits.shape[-1])
        cut = ((self.bits & own) != 0).any(-1).sum(-1, dtype=jnp.int32)
        cut = cut if rows is None else rows.total(cut)
        whole = (tiles - cut).astype(to_float) * (size * size)
        return whole + cut.astype(to_float) * (size * (size + 1) // 2)

    def executed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        """As `Index.executed_pairs`: float [B, Hq]."""
        return self._tiles(seq_len, rows).astype(jnp.result_type(float)) * self.block_size**2

    def computes(self, query_positions: Array, key_blocks: Array) -> Array:
        """As `Index.computes`: bool [B, Hq, R, C, 1]; of an index that holds all rows."""
        of_queries = self.bits[:, :, query_positions // self.block_size]
        return sets.contains(of_queries, key_blocks)[..., None]

    def on_one_device(
        self, batch: int, num_queries: int, num_heads: int, num_keys: int
    ) -> tuple[ListedTiles, None]:
        """As `Index.on_one_device`."""
        self._check(batch, num_heads, num_queries // self.block_size, num_keys // self.block_size)
        return tiles_of(self.bits, self.num_blocks, jnp.int32(0), self.block_size), None

    def shards(
        self, batch: int, num_heads: int, stride: int, num_blocks: int, rows: Array | None = None
    ) -> MaskShards:
        """As `Index.shards`."""
        count = num_blocks if rows is None else rows.shape[0]
        self._check(batch, num_heads, count, num_blocks)
        return MaskShards(self.bits, rows, num_blocks, self.block_size)

    def budgets(self) -> dict[str, Array]:
        """Blocks of each head."""
        return {"blocks": sets.count(self.bits).sum(-1, dtype=jnp.int32)}

    def told_length(self) -> int:
        """The length of the sequence."""
        return self.num_blocks * self.block_size

    def _check(self, batch: int, num_heads: int, rows: int, num_blocks: int) -> None:
        if num_blocks != self.num_blocks:
            raise ValueError(
                f"index.num_blocks={self.num_blocks} but there are {num_blocks} key blocks"
            )
        words = sets.words_for(num_blocks)
        check_shape("index.bits", self.bits, (batch, num_heads, rows, words))

    def _tiles(self, seq_len: int, rows: Rows | None) -> Array:
        """Int32 [B, Hq]: blocks that are set."""
        if seq_len != self.told_length():
            raise ValueError(
                f"seq_len={seq_len} but the index is of {self.told_length()} tokens"
            )
        tiles = sets.count(self.bits).sum(-1, dtype=jnp.int32)
        return tiles if rows is None else rows.total(tiles)
