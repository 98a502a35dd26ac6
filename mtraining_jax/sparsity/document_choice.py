"""Choosing columns and diagonals for each document of a pack, over all ranks.

The steps are those of `last_queries`, with each document in the place of the sequence. What is kept
is written down by blocks of the pack, since no two documents share one: columns as marks of the
tokens, and diagonal d of a document at the d-th of its blocks.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.sparsity import document_slots, estimate, exchange
from mtraining_jax.sparsity.checks import check_choice
from mtraining_jax.sparsity.document_slots import DocumentSlots
from mtraining_jax.sparsity.document_vertical_slash import DocumentVerticalSlash
from mtraining_jax.sparsity.pattern import Shards
from pallas_kernels.index import BlockMaskIndex
from pallas_kernels.index import bits as sets


def choose(
    q: Array, k: Array, shards: Shards, slots: DocumentSlots, pattern: DocumentVerticalSlash
) -> tuple[BlockMaskIndex, Array]:
    """Chooses for the documents in slots; dense documents keep all of their pairs.

    Args:
        q: [B, n, Hq, D], local queries, rotary embedding applied.
        k: [B, n, Hk, D], local keys in the same dtype; Hk divides Hq.
        shards: where they lie, with documents.
        slots: of these documents.
        pattern: what is kept.

    Returns:
        The index, this rank's rows; and fp32 [B, Hq], the share of the documents in slots for
        which `last_queries.choose` counts the head.

    Raises:
        ValueError: naming what does not fit.
    """
    check_choice(q, k, shards, pattern.block_size)
    batch, heads = q.shape[0], q.shape[2]
    q_last = document_slots.last_queries(q, slots, shards, pattern.last_q)
    scores = document_slots.softmax_scores(q_last, k, slots, shards)
    (vertical, own, tails), head = exchange.to_heads(
        scores, shards.block_ids, shards.num_blocks, shards.axis_names
    )
    # No tail reaches another document: a diagonal is held by a key that the last query sees.
    slash = jnp.flip(estimate.join_diagonals(own, tails), axis=(-2, -1))
    entries = exchange.entries_of(batch, heads, shards.axis_names)
    columns, diagonals, saved = _kept(vertical, slash, head, entries, slots, pattern)
    parts = sets.pack(columns), sets.pack(diagonals)[:, None], saved.astype(jnp.uint32)
    parts = jnp.concatenate([x.reshape(len(head), -1) for x in parts], axis=-1)
    parts = exchange.from_heads(parts, batch, heads, shards.axis_names)
    words = sets.words_for(shards.num_blocks)
    marks, diagonals = parts[..., : -words - 1], parts[..., -words - 1 : -1]
    index = _index(marks, diagonals, shards, pattern)
    share = parts[..., -1].astype(jnp.float32) / jnp.maximum(slots.count(), 1)[:, None]
    return index, share


def _kept(
    vertical: Array, slash: Array, heads: Array, entries: Array, slots: DocumentSlots,
    pattern: DocumentVerticalSlash,
) -> tuple[Array, Array, Array]:
    """What each row of (batch entry, head) keeps of each of its documents, one after another.

    Args:
        vertical: int32 [R, NB, g], masses of columns.
        slash: int32 [R, NB, g], masses of diagonals in the reversed order of the keys that hold
            them: a document's, in the order of distance, begin where its last real token lies.
        heads: int32 [R], the query heads.
        entries: int32 [R], the batch entries.
        slots: the documents.
        pattern: what is kept.

    Returns:
        Columns bool [R, NB, g]; bool [R, NB], diagonals d at block d of their document; int32 [R],
        how many documents `last_queries.choose` counts.
    """
    num_blocks, size = vertical.shape[-2:]
    seq_len = num_blocks * size

    def of_row(vertical, slash, head, first, blocks, tokens):  # [NB, g] twice, scalars
        start = first * size
        # Numbered from the document's first token, and from the distance 0.
        by_distance = jnp.stack([
            jnp.roll(vertical.reshape(-1), -start),
            jnp.roll(slash.reshape(-1), start + tokens - seq_len),
        ])
        inside = jnp.arange(seq_len, dtype=jnp.int32) < tokens
        by_distance = jnp.where(inside, by_distance, 0).reshape(2, 1, num_blocks, size)
        most = pattern.most_columns(blocks, num_blocks)
        kept = pattern.kept(by_distance, head[None], tokens, most)
        columns, diagonals, saved = (x[0] for x in kept)
        there = tokens > 0
        diagonals &= jnp.arange(num_blocks) < blocks
        columns = jnp.roll(columns & there, first, 0)
        return columns, jnp.roll(diagonals & there, first), saved * there

    def step(slot: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        places = (x[entries, slot] for x in (slots.first, slots.blocks, slots.tokens))
        columns, diagonals, saved = jax.vmap(of_row)(vertical, slash, heads, *places)
        return state[0] | columns, state[1] | diagonals, state[2] + saved

    rows = vertical.shape[0]
    nothing = (
        jnp.zeros(vertical.shape, bool), jnp.zeros((rows, num_blocks), bool),
        jnp.zeros(rows, jnp.int32),
    )
    # As often as some sequence has documents; every rank has its own heads, and waits for none.
    return lax.fori_loop(0, slots.count().max(), step, nothing)


def _index(
    marks: Array, diagonals: Array, shards: Shards, pattern: DocumentVerticalSlash
) -> BlockMaskIndex:
    """This rank's rows.

    Args:
        marks: uint32 [B, Hq, NB * ceil(g/32)], columns.
        diagonals: uint32 [B, Hq, ceil(NB/32)], diagonals at blocks of their documents.
        shards: where the rows lie.
        pattern: for what is static.
    """
    rows, num_blocks, own = shards.block_ids, shards.num_blocks, shards.documents
    blocks = jnp.arange(num_blocks, dtype=jnp.int32)
    first = own.of(rows).first  # [B, n]
    listed = sets.unpack(diagonals, num_blocks) | own.dense[:, None]
    # Row r sees key block c if diagonal r - c of its document is kept, at block first + r - c.
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
