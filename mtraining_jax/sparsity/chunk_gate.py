"""Which chunks of keys each query chooses, by products with their means.

Bits do not depend on the number of ranks: means are sums in a written-out order, and products have
shapes that depend on the whole sequence alone (see `estimate.py`).
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.sparsity import estimate, exchange, pooling, row_scores
from mtraining_jax.sparsity.pattern import Shards
from pallas_kernels.index import bits as sets
from pallas_kernels.index.token_chunks import chunk_starts, chunks_of


def chosen_chunks(q: Array, k: Array, shards: Shards, chunk_blocks: int, most: int) -> Array:
    """The own chunk of each query and the best of those before it.

    Args:
        q: [B, n, Hq, D], local queries.
        k: [B, n, Hk, D], local keys.
        shards: where they lie. With documents, the chunks of each begin with it, and a query
            chooses in its own.
        chunk_blocks: blocks of a chunk.
        most: chunks that a query chooses at most, its own among them; no more than there are.

    Returns:
        uint32 [B, Hq, n/g, g, ceil(NC/32)], bits as in `TokenChunksIndex`.
    """
    first = shards.first_blocks(shards.block_ids)
    own = jnp.atleast_2d(chunks_of(first, shards.block_ids, chunk_blocks))
    if first is not None:
        own = jnp.where(first < shards.num_blocks, own, -1)
        first = first // chunk_blocks
    return _chosen(q, chunk_means(k, shards, chunk_blocks), shards, own, most, first)


def chosen_blocks(q: Array, k: Array, shards: Shards, most: int) -> Array:
    """The own block of each local block of queries and the best before it, by their means.

    Args:
        q: [B, n, Hq, D], local queries.
        k: [B, n, Hk, D], local keys.
        shards: where they lie; padding is left out of means. With documents, a block chooses in its
            own.
        most: blocks that are chosen at most, the own one among them; no more than there are.

    Returns:
        uint32 [B, Hq, n/g, ceil(NB/32)], bits as in `BlockMaskIndex`; those of a block of no
        document mean nothing.
    """
    ends = shards.ends(shards.block_ids, q.shape[1] // shards.block_ids.shape[0])
    means = pooling.block_means(q, shards.block_ids, ends).astype(q.dtype)
    rows = means.transpose(0, 2, 1, 3)  # a token for each block
    first = shards.first_blocks(shards.block_ids)
    own = shards.block_ids[None]
    return _chosen(rows, chunk_means(k, shards, 1, ends), shards, own, most, first)[..., 0, :]


def _chosen(
    q: Array, means: Array, shards: Shards, own_chunks: Array, most: int,
    first_chunks: Array | None = None,
) -> Array:
    """As `chosen_chunks`, from the means [B, Hk, NC, D], with blocks of any size.

    The own chunk of those of a block is `own_chunks`, int32 [B or 1, n/g], -1 for blocks that
    choose nothing. They choose no chunk before `first_chunks`, int32 [B, n/g]; None for 0.
    """
    batch, kv_heads, num_chunks, dim = means.shape
    num_local = shards.block_ids.shape[0]
    size, heads = q.shape[1] // num_local, q.shape[2]
    words = sets.words_for(num_chunks)
    at_once = row_scores.rows_at_once(batch, heads, size, num_chunks, 1)
    at_once = min(at_once, max(shards.num_blocks // 64, 1))
    steps = -(-num_local // at_once)
    padding = steps * at_once - num_local
    own_chunks = jnp.pad(own_chunks, ((0, 0), (0, padding)))
    if first_chunks is not None:
        first_chunks = jnp.pad(first_chunks, ((0, 0), (0, padding)))
    blocks = q.reshape(batch, num_local, size, heads, dim).transpose(1, 0, 3, 2, 4)
    blocks = jnp.pad(blocks, ((0, padding), *([(0, 0)] * 4)))  # [n/g, B, Hq, g, D]
    # bf16 products are exact in fp32; only fp32 inputs need the slower passes.
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def step(i: Array) -> Array:
        own = lax.dynamic_slice_in_dim(blocks, i * at_once, at_once)
        chunk = lax.dynamic_slice_in_dim(own_chunks, i * at_once, at_once, axis=1)
        gate = lax.dot_general(
            own.transpose(1, 2, 0, 3, 4).reshape(batch, kv_heads, -1, dim), means,
            (((3,), (3,)), ((0, 1), (0, 1))),
            precision=precision, preferred_element_type=jnp.float32,
        ).reshape(batch, heads, at_once, size, num_chunks)
        numbers = jnp.arange(num_chunks, dtype=jnp.int32)
        past = numbers < chunk[:, None, :, None, None]
        if first_chunks is not None:
            first = lax.dynamic_slice_in_dim(first_chunks, i * at_once, at_once, axis=1)
            past = past & (numbers >= first[:, None, :, None, None])
        found = _best(jnp.where(past, gate, -jnp.inf), most - 1, words)
        return found | sets.single(chunk, words)[:, None, :, None]

    found = lax.map(step, jnp.arange(steps))  # [steps, B, Hq, at_once, g, words]
    found = jnp.moveaxis(found, 0, 2).reshape(batch, heads, steps * at_once, size, words)
    return found[:, :, :num_local]


def chunk_means(
    k: Array, shards: Shards, chunk_blocks: int, ends: Array | None = None
) -> Array:
    """Means of the keys of all chunks in their dtype: [B, Hk, NC, D], replicated.

    Chunks are numbered as in `TokenChunksIndex`. That of a last chunk which is not whole means
    nothing: no query has it before its own. So does that of one with padding in it, but for a chunk
    of one block and with `ends`.
    """
    means = pooling.block_means(k, shards.block_ids, ends).transpose(0, 2, 1, 3)
    means = exchange.all_blocks(
        means, shards.block_ids, shards.num_blocks, shards.axis_names
    ).transpose(0, 2, 1, 3)
    if shards.documents is None or chunk_blocks == 1:
        rest = -means.shape[2] % chunk_blocks
        means = jnp.pad(means, ((0, 0), (0, 0), (0, rest), (0, 0)))
        means = means.reshape(*means.shape[:2], -1, chunk_blocks, means.shape[-1])
    else:
        every = jnp.arange(shards.num_blocks, dtype=jnp.int32)
        first = shards.documents.first
        starts = chunk_starts(first, every, shards.num_blocks, chunk_blocks)
        blocks = starts[..., None] + jnp.arange(chunk_blocks, dtype=jnp.int32)  # [B, NC, blocks]
        means = jax.vmap(lambda x, at: x.at[:, at].get(mode="clip"))(means, blocks)
    return (estimate.ordered_sum(means) / chunk_blocks).astype(k.dtype)


def _best(gate: Array, count: int, words: int) -> Array:
    """The largest entries of the last axis as bits: fp32 [..., NC] to uint32 [..., words].

    Entries -inf do not count. Of equal entries the first comes first, as `top_k` promises.
    """
    if count == 0:
        return jnp.zeros((*gate.shape[:-1], words), jnp.uint32)
    values, places = lax.top_k(gate, count)
    found = jnp.zeros((*gate.shape[:-1], words), jnp.uint32)
    numbers = jnp.arange(words, dtype=jnp.int32)
    for i in range(count):
        place = jnp.where(values[..., i] > -jnp.inf, places[..., i], -1)[..., None]
        bit = jnp.uint32(1) << (place % 32).astype(jnp.uint32)
        found |= jnp.where((place >= 0) & (place // 32 == numbers), bit, jnp.uint32(0))
    return found
