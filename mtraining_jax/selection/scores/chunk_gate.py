"""MoBA's gate: selection of key chunks per query, by products with chunk means.

Results are bit-identical for any number of ranks: means are sums in a fixed order, and shapes of
products depend only on the whole sequence (see `estimate.py`).
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.selection import collectives
from mtraining_jax.selection.context import Selection, SelectionContext, check_selection
from mtraining_jax.selection.scores import estimate, pooling, row_scores
from pallas_kernels.index import BlockMaskIndex, TokenChunksIndex
from pallas_kernels.index import bits as sets
from pallas_kernels.index.token_chunks import chunk_starts, chunks_of


def select_chunks(
    q: Array, k: Array, context: SelectionContext, block_size: int, chunk_blocks: int, top_k: int
) -> Selection:
    """Selects at most `top_k` chunks of `chunk_blocks` blocks for each query."""
    check_selection(q, k, context, block_size)
    most = min(top_k, -(-context.num_blocks // chunk_blocks))
    words = _best_chunks(q, k, context, chunk_blocks, most)
    first = context.first_blocks(context.block_ids)
    if first is not None:
        first = jnp.broadcast_to(first[:, None], words.shape[:3])
    return Selection(
        TokenChunksIndex(words, context.num_blocks, chunk_blocks, most, block_size, first)
    )


def select_blocks(
    q: Array, k: Array, context: SelectionContext, block_size: int, top_blocks: int
) -> Selection:
    """Selects at most `top_blocks` key blocks for each query block."""
    check_selection(q, k, context, block_size)
    bits = _best_blocks(q, k, context, min(top_blocks, context.num_blocks))
    if context.documents.packed:  # blocks without a document compute nothing
        bits &= context.documents.causal_blocks(context.block_ids, context.num_blocks)
    return Selection(BlockMaskIndex(bits, context.num_blocks, block_size))


def _best_chunks(
    q: Array, k: Array, context: SelectionContext, chunk_blocks: int, most: int
) -> Array:
    """Selects each query's own chunk and the best earlier chunks.

    With documents, chunks start at document boundaries, and queries select chunks of their own
    document. A chunk has `chunk_blocks` blocks. At most `most` chunks are selected per query,
    including its own.

    Returns:
        uint32 [B, Hq, n/g, g, ceil(NC/32)], bits as in `TokenChunksIndex`.
    """
    first = context.first_blocks(context.block_ids)
    own_chunks = jnp.atleast_2d(chunks_of(first, context.block_ids, chunk_blocks))
    if first is not None:
        own_chunks = jnp.where(first < context.num_blocks, own_chunks, -1)
        first = first // chunk_blocks
    return _best_of(q, chunk_means(k, context, chunk_blocks), context, own_chunks, most, first)


def _best_blocks(q: Array, k: Array, context: SelectionContext, most: int) -> Array:
    """Selects each query block's own key block and the best earlier ones, by block means.

    Means ignore padding. With documents, query blocks select blocks of their own document. At most
    `most` blocks are selected per query block, including its own.

    Returns:
        uint32 [B, Hq, n/g, ceil(NB/32)], bits as in `BlockMaskIndex`; undefined for blocks without
        a document.
    """
    ends = context.ends(context.block_ids)
    rows = pooling.block_means(q, context.block_ids, ends).astype(q.dtype)
    rows = rows.transpose(0, 2, 1, 3)  # one token per block
    first = context.first_blocks(context.block_ids)
    means = chunk_means(k, context, 1, ends)
    return _best_of(rows, means, context, context.block_ids[None], most, first)[..., 0, :]


def _best_of(
    q: Array,
    means: Array,
    context: SelectionContext,
    own_chunks: Array,
    most: int,
    first_chunks: Array | None = None,
) -> Array:
    """Selects chunks by means [B, Hk, NC, D], with blocks of any size.

    The own chunk of a block, int32 [B or 1, n/g], is -1 for blocks that select nothing. No chunk
    before `first_chunks`, int32 [B, n/g], is selected.
    """
    batch, kv_heads, num_chunks, dim = means.shape
    num_local = context.block_ids.shape[0]
    size, heads = q.shape[1] // num_local, q.shape[2]
    words = sets.words_for(num_chunks)
    at_once = row_scores.rows_at_once(batch, heads, size, num_chunks, 1)
    at_once = min(at_once, max(context.num_blocks // 64, 1))
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
        queries = lax.dynamic_slice_in_dim(blocks, i * at_once, at_once)
        chunk = lax.dynamic_slice_in_dim(own_chunks, i * at_once, at_once, axis=1)
        gate = lax.dot_general(
            queries.transpose(1, 2, 0, 3, 4).reshape(batch, kv_heads, -1, dim),
            means,
            (((3,), (3,)), ((0, 1), (0, 1))),
            precision=precision,
            preferred_element_type=jnp.float32,
        ).reshape(batch, heads, at_once, size, num_chunks)
        numbers = jnp.arange(num_chunks, dtype=jnp.int32)
        past = numbers < chunk[:, None, :, None, None]
        if first_chunks is not None:
            first = lax.dynamic_slice_in_dim(first_chunks, i * at_once, at_once, axis=1)
            past = past & (numbers >= first[:, None, :, None, None])
        best = _best(jnp.where(past, gate, -jnp.inf), most - 1, words)
        return best | sets.single(chunk, words)[:, None, :, None]

    bits = lax.map(step, jnp.arange(steps))  # [steps, B, Hq, at_once, g, words]
    bits = jnp.moveaxis(bits, 0, 2).reshape(batch, heads, steps * at_once, size, words)
    return bits[:, :, :num_local]


def chunk_means(
    k: Array, context: SelectionContext, chunk_blocks: int, ends: Array | None = None
) -> Array:
    """Computes the mean key of every chunk in the keys' dtype: [B, Hk, NC, D], replicated.

    Undefined for an incomplete last chunk, which no query has before its own, and for chunks with
    padding, except chunks of one block with `ends`.
    """
    means = pooling.block_means(k, context.block_ids, ends).transpose(0, 2, 1, 3)
    means = collectives.all_blocks(means, *context.shards).transpose(0, 2, 1, 3)
    if not context.documents.packed or chunk_blocks == 1:
        rest = -means.shape[2] % chunk_blocks
        means = jnp.pad(means, ((0, 0), (0, 0), (0, rest), (0, 0)))
        means = means.reshape(*means.shape[:2], -1, chunk_blocks, means.shape[-1])
    else:
        rows = jnp.arange(context.num_blocks, dtype=jnp.int32)
        first = context.documents.first
        starts = chunk_starts(first, rows, context.num_blocks, chunk_blocks)
        blocks = starts[..., None] + jnp.arange(chunk_blocks, dtype=jnp.int32)  # [B, NC, blocks]
        means = jax.vmap(lambda x, at: x.at[:, at].get(mode="clip"))(means, blocks)
    return (estimate.ordered_sum(means) / chunk_blocks).astype(k.dtype)


def _best(gate: Array, count: int, words: int) -> Array:
    """Marks the largest entries of fp32 [..., NC] as bits, without -inf; ties go to the first."""
    if count == 0:
        return jnp.zeros((*gate.shape[:-1], words), jnp.uint32)
    values, chunks = lax.top_k(gate, count)
    bits = jnp.zeros((*gate.shape[:-1], words), jnp.uint32)
    numbers = jnp.arange(words, dtype=jnp.int32)
    for i in range(count):
        chunk = jnp.where(values[..., i] > -jnp.inf, chunks[..., i], -1)[..., None]
        bit = jnp.uint32(1) << (chunk % 32).astype(jnp.uint32)
        bits |= jnp.where((chunk >= 0) & (chunk // 32 == numbers), bit, jnp.uint32(0))
    return bits
