"""Attention over an index that cannot be expressed as tiles, on the shards of a sequence."""

import jax.numpy as jnp
from jax import Array

from mtraining_jax.parallel.ring import ring_attention
from mtraining_jax.sparsity import Shards, exchange
from pallas_kernels.composed import chunk_attention
from pallas_kernels.index import TokenChunksIndex


def composed_ring(
    q: Array, k: Array, v: Array, index: TokenChunksIndex, shards: Shards, **ring: object
) -> tuple[Array, Array]:
    """Attention of one rank's queries to selected chunks of all keys; differentiable.

    The query's own chunk is covered by the ring. For past chunks, the keys and values of all
    ranks are gathered, across nodes too.

    Args:
        q: [B, n, Hq, D], this rank's queries.
        k: [B, n, Hk, D], this rank's keys.
        v: [B, n, Hk, D], this rank's values.
        index: the rows of this rank's blocks.
        shards: the shards of the sequence, on more than one rank.
        **ring: arguments of `ring_attention` after the index.

    Returns:
        out [B, n, Hq, D] in the dtype of q; lse fp32 [B, Hq, n].
    """
    own = ring_attention(q, k, v, index.own(shards.block_ids), **ring)
    where = shards.block_ids, shards.num_blocks, shards.axis_names
    # Via fp32, so that the ranks' gradients of a key are summed in fp32.
    keys, values = (
        exchange.all_blocks(x.astype(jnp.float32), *where).astype(x.dtype) for x in (k, v)
    )
    options = {name: ring[name] for name in ("scale", "backend")}
    return chunk_attention(q, keys, values, index, shards.block_ids, own, **options)
