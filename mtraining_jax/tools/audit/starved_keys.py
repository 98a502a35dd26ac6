"""Keys that no later query block computes."""

import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.selection.row_attention import Keys

_QUERY_BLOCKS = 256  # processed together; bounds memory
_KEY_BLOCKS = 64


def starved_keys(keys: Keys, num_heads: int) -> tuple[Array, Array]:
    """Finds local keys that no later query block computes, although one could: bool [B, Hq, n].

    Also returns bool [B or 1, 1, n], keys that are not padding and have a later block in their
    document. A key's own block is ignored, since every pattern keeps it.
    """
    # The last query of a block is checked: in most index types all of them compute the same keys.
    size, num_blocks = keys.block_size, keys.num_blocks
    num_local, batch = keys.block_ids.shape[0], keys.k.shape[0]
    width = min(_KEY_BLOCKS, num_local)
    depth = min(_QUERY_BLOCKS, num_blocks)

    def of_keys(i):
        # The last chunk starts early enough to end with the last block.
        ids = lax.dynamic_slice_in_dim(
            keys.block_ids, jnp.minimum(i * width, num_local - width), width
        )

        def of_queries(found, j):
            blocks = jnp.minimum(j * depth, num_blocks - depth) + jnp.arange(depth)
            kept = keys.index.computes(blocks * size + size - 1, ids)
            later = (ids < blocks[:, None]) & keys.documents.of(blocks).contain(ids)  # [B, Q, C]
            kept = (kept & later[:, None, :, :, None]).any(2)
            return found | jnp.broadcast_to(kept, found.shape), None

        none = jnp.zeros((batch, num_heads, width, size), bool)
        return lax.scan(of_queries, none, jnp.arange(-(-num_blocks // depth)))[0]

    count = -(-num_local // width)
    chunks = jnp.moveaxis(lax.map(of_keys, jnp.arange(count)), 0, 2)  # [B, Hq, count, C, g]
    last = chunks[:, :, -1, (count * width - num_local) :]
    first = chunks[:, :, :-1].reshape(batch, num_heads, (count - 1) * width, size)
    kept = jnp.concatenate([first, last], 2).reshape(batch, num_heads, -1)
    could = _could(keys)
    return could & ~kept, could


def _could(keys: Keys) -> Array:
    """Returns the keys that a later block may compute: bool [B or 1, 1, n]."""
    size = keys.block_size
    places = (keys.block_ids[:, None] * size + jnp.arange(size)).reshape(-1)
    own = keys.documents.of(keys.block_ids)
    ends = jnp.minimum(own.ends(), (own.first + own.length - 1) * size)
    return (places < jnp.repeat(jnp.where(own.length > 0, ends, 0), size, axis=-1))[:, None]
