"""Block lists of shards, from the bits of the rows that one rank holds."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from pallas_kernels.index import bits as sets
from pallas_kernels.index.protocol import Segment, ShardTiles
from pallas_kernels.tiles import NO_DIAGONAL, ListedTiles


@dataclasses.dataclass(frozen=True)
class MaskShards(ShardTiles):
    """Rows of bits; each pair of shards uses its own rows and key blocks."""

    bits: Array  # uint32 [B, Hq, n, ceil(NB/32)], as in `BlockMaskIndex`
    rows: Array | None  # int32 [n], global block number of each row; None for 0 .. NB - 1
    num_blocks: int  # NB
    block_size: int

    def pair(self, query: Segment, key: Segment) -> ListedTiles:
        lag = jnp.asarray(query.first_block - key.first_block, jnp.int32)
        diagonal = jnp.where(lag % query.stride == 0, -(lag // query.stride), NO_DIAGONAL)
        # Keys ascend, and none after the masked one is listed: it is the last of its list.
        words = sets.pack(sets.contains(self.rows_of(query), key.blocks()))
        return tiles_of(words, key.num_blocks, diagonal, self.block_size)

    def gathered(self, query: Segment, keys: Array, skip_own: bool) -> ListedTiles:
        size = query.num_blocks
        steps = query.stride * jnp.arange(size, dtype=jnp.int32)
        blocks = (keys[:, None] + steps).reshape(-1).astype(jnp.int32)
        own = keys == query.first_block
        words = sets.contains(self.rows_of(query), blocks)
        if skip_own:
            words = sets.pack(words & ~jnp.repeat(own, size))
            return tiles_of(words, blocks.size, jnp.asarray(NO_DIAGONAL), self.block_size)
        offset = -jnp.argmax(own).astype(jnp.int32) * size
        diagonal = jnp.where(own.any(), offset, NO_DIAGONAL)
        last = jnp.where(own.any(), jnp.arange(size, dtype=jnp.int32) - offset, -1)
        return tiles_of(sets.pack(words), blocks.size, diagonal, self.block_size, last)

    def rows_of(self, query: Segment, of: Array | None = None) -> Array:
        """Selects the rows of a segment, of the bits or of an array [B, Hq, n, ...]."""
        of = self.bits if of is None else of
        if self.rows is None:
            return of[:, :, query.blocks()]
        if self.rows.shape[0] == query.num_blocks:  # the rank has a single segment
            return of
        places = jnp.arange(self.rows.shape[0], dtype=jnp.int32)
        where = jnp.zeros(self.num_blocks, jnp.int32).at[self.rows].set(places)
        return of[:, :, where[query.blocks()]]


def tiles_of(
    words: Array, num_keys: int, diagonal: Array, block_size: int, last: Array | None = None
) -> ListedTiles:
    """Builds the lists of rows of bits, uint32 [B, Hq, n, ceil(num_keys/32)], and their transpose.

    `last`, int32 [n], is the key block to move to the end of its list, or -1; None for no moves.
    """
    columns, column_count = sets.listed(sets.transpose(words, num_keys), words.shape[-2])
    if last is None:
        rows, row_count = sets.listed(words, num_keys)
        return ListedTiles(rows, row_count, columns, column_count, diagonal, block_size)
    own = sets.single(last, words.shape[-1])
    listed = (words & own).any(-1)
    rows, others = sets.listed(words & ~own, num_keys)
    slots = jnp.arange(num_keys, dtype=jnp.int32)
    at_end = listed[..., None] & (slots == others[..., None])
    rows = jnp.where(at_end, last[:, None], rows)
    return ListedTiles(rows, others + listed, columns, column_count, diagonal, block_size)
