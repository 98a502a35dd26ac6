"""Block lists of shards."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from pallas_kernels.index.entries import live
from pallas_kernels.index.shards import Segment, ShardTiles
from pallas_kernels.tiles import NO_DIAGONAL, ListedTiles

_NOT_HERE = -1


@dataclasses.dataclass(frozen=True)
class ListedShards(ShardTiles):
    """Lists of global blocks; each pair of shards uses its own rows and entries."""

    key_blocks: Array  # int32 [B, Hq, NB, M], key blocks of each query block
    key_count: Array  # int32 [B, Hq, NB]
    query_blocks: Array  # int32 [B, Hq, NB, M'], query blocks of each key block, ascending
    query_count: Array  # int32 [B, Hq, NB]
    block_size: int

    def pair(self, query: Segment, key: Segment) -> ListedTiles:
        lag = jnp.asarray(query.first_block - key.first_block, jnp.int32)
        diagonal = jnp.where(lag % query.stride == 0, -(lag // query.stride), NO_DIAGONAL)
        return self._tiles(query, key.blocks(), jnp.ones(key.num_blocks, bool), diagonal)

    def gathered(self, query: Segment, keys: Array, skip_own: bool) -> ListedTiles:
        own = keys == query.first_block
        size = query.num_blocks
        steps = query.stride * jnp.arange(size, dtype=jnp.int32)
        blocks = (keys[:, None] + steps).reshape(-1).astype(jnp.int32)
        if skip_own:
            taken, diagonal = ~own, jnp.asarray(NO_DIAGONAL)
        else:
            taken = jnp.ones_like(own)
            diagonal = jnp.where(own.any(), -jnp.argmax(own).astype(jnp.int32) * size, NO_DIAGONAL)
        return self._tiles(query, blocks, jnp.repeat(taken, size), diagonal)

    def _tiles(self, query: Segment, keys: Array, taken: Array, diagonal: Array) -> ListedTiles:
        num_blocks, queries = self.key_count.shape[-1], query.blocks()
        rows = jnp.arange(query.num_blocks, dtype=jnp.int32)
        local_query = jnp.full(num_blocks, _NOT_HERE, jnp.int32).at[queries].set(rows)
        columns = jnp.where(taken, jnp.arange(keys.size, dtype=jnp.int32), _NOT_HERE)
        local_key = jnp.full(num_blocks, _NOT_HERE, jnp.int32).at[keys].set(columns)
        key_blocks, key_count = _here(
            self.key_blocks[:, :, queries],
            self.key_count[:, :, queries],
            local_key,
            keys.size,
            rows - diagonal,
        )
        counts = jnp.where(taken, self.query_count[:, :, keys], 0)
        # A key block's masked query block comes first: no earlier one sees the key block.
        query_blocks, query_count = _here(
            self.query_blocks[:, :, keys], counts, local_query, queries.size
        )
        return ListedTiles(
            key_blocks, key_count, query_blocks, query_count, diagonal, self.block_size
        )


def _here(
    lists: Array, count: Array, local: Array, size: int, last: Array | None = None
) -> tuple[Array, Array]:
    """Extracts the list entries in a shard of `size` blocks, as ascending local numbers.

    `local` is the local number of each global block, or `_NOT_HERE`. `last` is moved to the end of
    its list. Lists are padded with the largest integer.
    """
    past = jnp.iinfo(jnp.int32).max
    found = jnp.where(live(lists, count), local[jnp.clip(lists, 0, local.size - 1)], _NOT_HERE)
    here = found != _NOT_HERE
    order = jnp.where(here, found, past)
    if last is not None:
        order = jnp.where(here & (found == last[:, None]), past - 1, order)
    order = jnp.sort(order, axis=-1)
    if last is not None:
        order = jnp.where(order == past - 1, last[:, None], order)
    order = order[..., :size]
    if order.shape[-1] == 0:  # kernels need at least one (invalid) entry
        order = jnp.full((*order.shape[:-1], 1), past, jnp.int32)
    return order, here.sum(-1, dtype=jnp.int32)
