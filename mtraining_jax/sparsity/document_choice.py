"""Selection of columns and diagonals for each document of a pack, over all ranks.

The steps are those of `last_queries`, applied per document instead of per sequence. Since documents
do not share blocks, results are stored by blocks of the pack: columns as marked tokens, and
diagonal d of a document at its d-th block.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from mtraining_jax.sparsity import document_slots, estimate, exchange
from mtraining_jax.sparsity.checks import check_choice
from mtraining_jax.sparsity.document_last_queries import DocumentLastQueries
from mtraining_jax.sparsity.document_slots import DocumentSlots
from mtraining_jax.sparsity.pattern import Shards
from mtraining_jax.sparsity.spans import PackedSpans
from pallas_kernels.index import BlockMaskIndex
from pallas_kernels.index import bits as sets


def choose(
    q: Array, k: Array, shards: Shards, slots: DocumentSlots, pattern: DocumentLastQueries
) -> tuple[BlockMaskIndex, Array]:
    """Selects for the documents in slots; dense documents keep all of their pairs.

    Args:
        q: [B, n, Hq, D], local queries, after rotary embedding.
        k: [B, n, Hk, D], local keys in the same dtype; Hk divides Hq.
        shards: the shards of the sequence, with documents.
        slots: slots of these documents.
        pattern: the pattern.

    Returns:
        The index with this rank's rows; and fp32 [B, Hq], the fraction of documents in slots for
        which the second result of `last_queries.choose` is 1.

    Raises:
        ValueError: if the inputs are invalid.
    """
    check_choice(q, k, shards, pattern.block_size)
    batch, heads = q.shape[0], q.shape[2]
    q_last = document_slots.last_queries(q, slots, shards, pattern.last_q)
    scores = pattern.scores(q_last, k, slots, shards)
    (vertical, own, tails), head = exchange.to_heads(
        scores, shards.block_ids, shards.num_blocks, shards.axis_names
    )
    # Tails never reach another document: the key that holds a diagonal is seen by the last query.
    slash = estimate.join_diagonals(own, tails)
    entries = exchange.entries_of(batch, heads, shards.axis_names)
    shares = None if shards.shares is None else shards.shares[entries]
    columns, diagonals, saved = _kept(vertical, slash, head, entries, slots, pattern, shares)
    parts = sets.pack(columns), sets.pack(diagonals)[:, None], saved.astype(jnp.uint32)
    parts = jnp.concatenate([x.reshape(len(head), -1) for x in parts], axis=-1)
    parts = exchange.from_heads(parts, batch, heads, shards.axis_names)
    words = sets.words_for(shards.num_blocks)
    marks, diagonals = parts[..., : -words - 1], parts[..., -words - 1 : -1]
    index = _index(marks, diagonals, shards, pattern)
    share = parts[..., -1].astype(jnp.float32) / jnp.maximum(slots.count(), 1)[:, None]
    return index, share


def _kept(
    vertical: Array,
    slash: Array,
    heads: Array,
    entries: Array,
    slots: DocumentSlots,
    pattern: DocumentLastQueries,
    shares: Array | None,
) -> tuple[Array, Array, Array]:
    """Selects for each row (batch entry, head) and all of its documents in one pass.

    Returns columns bool [R, NB, g]; bool [R, NB], diagonal d at block d of its document; and
    int32 [R], the sum over documents of the second result of `last_queries.choose`.
    """
    spans = PackedSpans(*(x[entries] for x in slots))
    most = pattern.most_columns(spans.length, vertical.shape[-2])
    scores = by_distance(vertical, slash, spans)
    columns, diagonals, saved = pattern.kept(scores, heads, spans, most, shares)
    inside = spans.inside
    return columns & inside[..., None], diagonals & inside, saved.sum(-1, dtype=jnp.int32)


def by_distance(vertical: Array, slash: Array, spans: PackedSpans) -> Array:
    """Orders the scores of each document: columns by token, diagonals by distance.

    Args:
        vertical: int32 or fp32 [R, NB, g], scores of columns.
        slash: int32 or fp32 [R, NB, g], scores of diagonals, at the key that the last query sees.
        spans: the documents; the last query is that of their last token.

    Returns:
        [2, R, NB, g], distance i of a document at its token i; 0 after its tokens.
    """
    num_blocks, size = vertical.shape[-2:]
    start, tokens = spans.start * size, spans.spread(spans.tokens)
    # Distance i is stored at the i-th token before the last one.
    distance = spans.entries(size)
    held_by = jnp.clip((start + tokens - 1)[..., None] - distance, 0, num_blocks * size - 1)
    slash = jnp.take_along_axis(
        slash.reshape(len(slash), -1), held_by.reshape(len(slash), -1), axis=1
    ).reshape(slash.shape)
    there = spans.inside[..., None] & (distance < tokens[..., None])
    return jnp.where(there, jnp.stack([vertical, slash]), 0)


def _index(
    marks: Array, diagonals: Array, shards: Shards, pattern: DocumentLastQueries
) -> BlockMaskIndex:
    """Builds this rank's index from columns uint32 [B, Hq, NB * ceil(g/32)] and diagonals."""
    rows, num_blocks, own = shards.block_ids, shards.num_blocks, shards.documents
    blocks = jnp.arange(num_blocks, dtype=jnp.int32)
    first = own.of(rows).first  # [B, n]
    listed = sets.unpack(diagonals, num_blocks) | own.dense[:, None]
    # Row r sees key block c if diagonal r - c of its document, at block first + r - c, is kept.
    place = jnp.clip(first[..., None] + rows[:, None] - blocks, 0, num_blocks - 1)
    seen = jax.vmap(lambda kept, place: kept[:, place])(listed, place)  # [B, Hq, n, NB]
    bits = sets.pack(seen) & own.causal_blocks(rows, num_blocks)
    index = BlockMaskIndex(bits, num_blocks, pattern.block_size)
    capacity = pattern.column_capacity(num_blocks)
    if not capacity:
        return index
    marks = marks.reshape(*marks.shape[:2], num_blocks, -1)[:, :, rows]
    index = dataclasses.replace(index, column_marks=marks, max_columns=capacity)
    return index.columns_from(first[:, None])
