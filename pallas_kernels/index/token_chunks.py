"""Chunks of keys for each single query: what block lists cannot say."""

import dataclasses
import functools
from typing import ClassVar, NoReturn

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.index import bits as sets
from pallas_kernels.index.block_mask import BlockMaskIndex
from pallas_kernels.index.protocol import Index, Rows
from pallas_kernels.tiles.protocol import check_shape


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["chosen"],
    meta_fields=["num_blocks", "chunk_blocks", "most", "block_size"],
)
@dataclasses.dataclass(frozen=True)
class TokenChunksIndex(Index):
    """Which chunks of keys each query sees, as bits.

    A pair (q, k) is computed iff k <= q and the chunk of key k is chosen by query q. Every query
    has chosen its own chunk, and none behind it. No list of tiles says that: neighbouring queries
    choose differently. `composed.chunk_attention` computes it by calls over other indices.

    Attributes:
        chosen: uint32 [B, Hq, rows, g, ceil(NC/32)]; bit c of the words of query i of a row of
            blocks: whether it sees chunk c. NC = ceil(NB / `chunk_blocks`).
        num_blocks: NB, blocks of the whole sequence (static).
        chunk_blocks: blocks of a chunk (static).
        most: chunks that a query chooses at most, its own among them (static).
        block_size: g (static).
    """

    chosen: Array
    num_blocks: int
    chunk_blocks: int
    most: int
    block_size: int

    causal = True
    by_rows: ClassVar[bool] = True
    key_shards_apart: ClassVar[bool] = False
    composed: ClassVar[bool] = True

    @property
    def num_chunks(self) -> int:
        """NC."""
        return -(-self.num_blocks // self.chunk_blocks)

    def past(self, rows: Array) -> Array:
        """The chunks that each query sees whole: `chosen` without its own, like it.

        Args:
            rows: int32 [rows], global block number of each row.
        """
        own = sets.single(rows // self.chunk_blocks, self.chosen.shape[-1])
        return self.chosen & ~own[:, None]

    def own(self, rows: Array) -> BlockMaskIndex:
        """The causal pairs within each query's own chunk.

        Args:
            rows: as in `past`.
        """
        blocks = jnp.arange(self.num_blocks, dtype=jnp.int32)
        same = rows[:, None] // self.chunk_blocks == blocks // self.chunk_blocks
        mask = jnp.broadcast_to(same, (*self.chosen.shape[:2], *same.shape))
        return BlockMaskIndex.from_block_mask(mask, self.block_size, rows)

    def computed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        """As `Index.computed_pairs`: float [B, Hq]."""
        self._check_length(seq_len)
        chunk = self.chunk_blocks * self.block_size
        whole, rest = divmod(seq_len, chunk)
        own = whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2
        past = self._past_counts(rows).sum(-1, dtype=jnp.int32)
        past = past if rows is None else rows.total(past)
        return past.astype(jnp.result_type(float)) * chunk + own

    def executed_pairs(self, seq_len: int, rows: Rows | None = None) -> Array:
        """As `Index.executed_pairs`: queries of a chunk are put together in tiles, rounded up."""
        self._check_length(seq_len)
        within = [block % self.chunk_blocks + 1 for block in range(self.num_blocks)]
        tiles = (-(-self._past_counts(rows) // self.block_size)).sum(-1, dtype=jnp.int32)
        tiles = tiles if rows is None else rows.total(tiles)
        tiles = tiles.astype(jnp.result_type(float)) * self.chunk_blocks + sum(within)
        return tiles * self.block_size**2

    def computes(self, query_positions: Array, key_blocks: Array) -> Array:
        """As `Index.computes`: bool [B, Hq, R, C, 1]; of an index that holds all rows."""
        size = self.block_size
        of_queries = self.chosen[:, :, query_positions // size, query_positions % size]
        return sets.contains(of_queries, key_blocks // self.chunk_blocks)[..., None]

    def on_one_device(
        self, batch: int, num_queries: int, num_heads: int, num_keys: int
    ) -> NoReturn:
        """There are no tiles of it.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "an index of chunks for each token has no tiles of its own: it runs by "
            "pallas_kernels.attention or sparse_attention, not by plan, forward and backward"
        )

    def shards(
        self, batch: int, num_heads: int, stride: int, num_blocks: int, rows: Array | None = None
    ) -> NoReturn:
        """As `on_one_device`."""
        self.on_one_device(batch, 0, num_heads, 0)

    def budgets(self) -> dict[str, Array]:
        """Chunks of all queries of each head, and how many key blocks that is for a query."""
        return {"chunks": sets.count(self.chosen).sum((-2, -1), dtype=jnp.int32)}

    def told_length(self) -> int:
        """The length of the sequence."""
        return self.num_blocks * self.block_size

    def check(self, batch: int, num_heads: int, rows: int) -> None:
        """Raises ValueError unless its array suits a call."""
        words = sets.words_for(self.num_chunks)
        check_shape(
            "index.chosen", self.chosen, (batch, num_heads, rows, self.block_size, words)
        )

    def _check_length(self, seq_len: int) -> None:
        if seq_len != self.told_length():
            raise ValueError(f"seq_len={seq_len} but the index is of {self.told_length()} tokens")

    def _past_counts(self, rows: Rows | None) -> Array:
        """Int32 [B, Hq, NC]: queries held here that see each chunk as a past one."""
        count = self.chosen.shape[2]
        numbers = jnp.arange(count, dtype=jnp.int32) if rows is None else rows.blocks
        marked = sets.unpack(self.past(numbers), self.num_chunks)
        return marked.sum((2, 3), dtype=jnp.int32)
