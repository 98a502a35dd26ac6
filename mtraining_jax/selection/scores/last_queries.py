"""Steps of a selection with the last queries as probe queries, over all ranks.

Rows are pairs (batch entry, head), and each rank selects for some of them: a search over all ranks
would need a collective for every digit of a score. The selection is bit-identical for any number
of ranks and assignment of blocks. Ties go to the smaller position (columns) or distance
(diagonals). A diagonal at token distance s selects block diagonal floor(s/g) and, unless g divides
s, floor(s/g)+1.

A row is one sequence, or several: the documents of a pack. Documents do not share blocks, so their
results are stored by blocks of the pack: diagonal d of a document at its d-th block.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mtraining_jax.selection import collectives
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.document_blocks import DocumentBlocks
from mtraining_jax.selection.rules import top_p
from mtraining_jax.selection.scores import document_scores, estimate
from mtraining_jax.selection.spans import OneSpan, PackedSpans, Spans
from pallas_kernels.index import BlockMaskIndex, VerticalSlashIndex
from pallas_kernels.index import bits as sets


class Probed(NamedTuple):
    """Scores of the rows of this rank.

    Attributes:
        by_distance: int32 or fp32 [2, R, NB, g], scores of columns, and of diagonals by distance,
            for each sequence. Entries after its tokens belong to no visible column or diagonal.
        heads: int32 [R], the query head of each row.
        spans: the sequences.
        mass_fraction: int32 [R], `SelectionContext.mass_fraction` of each row, or None.
    """

    by_distance: Array
    heads: Array
    spans: Spans
    mass_fraction: Array | None


class Kept(NamedTuple):
    """The selection for the rows of this rank.

    Attributes:
        columns: bool [R, NB, g].
        diagonals: bool [R, NB], block diagonals.
        saved: int32 [R] or [R, E], 1 for a sequence that would be left without columns, since the
            first one crosses the mass target and is dropped, if the rule had no minimum.
    """

    columns: Array
    diagonals: Array
    saved: Array


def probe(q: Array, k: Array, context: SelectionContext, count: int, by_logits: bool) -> Probed:
    """Scores columns and diagonals of whole sequences, by the last `count` queries before padding.

    Scores are sums of raw logits, or mean softmax masses. With fewer valid tokens, all queries are
    used. Backends may differ in a score's last bits, so a run should use a single one.
    """
    where = context.block_ids, context.num_blocks, context.axis_names
    seq_len = context.num_blocks * (q.shape[1] // context.block_ids.shape[0])
    valid_len = seq_len if context.valid_len is None else context.valid_len
    last = estimate.last_positions(count, valid_len)
    q_last = collectives.gather_rows(q, last, *where).transpose(0, 2, 1, 3)
    score = estimate.logit_scores if by_logits else estimate.softmax_scores
    (vertical, own, tails), heads = collectives.to_heads(score(q_last, k, context), *where)
    slash = estimate.join_diagonals(own, tails)
    # Reverses diagonals, so that both are in ascending order of distance.
    slash = jnp.flip(slash, axis=(-2, -1))
    if context.valid_len is not None:
        # Token V-1-s stores diagonal s; entries that padding would store move to the end.
        slash = jnp.roll(slash.reshape(-1, seq_len), valid_len - seq_len, 1).reshape(slash.shape)
    spans = OneSpan(context.num_blocks, valid_len)
    return Probed(jnp.stack([vertical, slash]), heads, spans, _mass_fraction(q, context))


def probe_documents(
    q: Array, k: Array, context: SelectionContext, slots: PackedSpans, count: int, by_logits: bool
) -> Probed:
    """Scores like `probe` within each document in `slots`, with its own last queries."""
    q_last = document_scores.last_queries(q, slots, context, count)
    score = document_scores.logit_scores if by_logits else document_scores.softmax_scores
    (vertical, own, tails), heads = collectives.to_heads(
        score(q_last, k, slots, context), context.block_ids, context.num_blocks, context.axis_names
    )
    # Tails never reach another document: the key that holds a diagonal is seen by the last query.
    slash = estimate.join_diagonals(own, tails)
    spans = slots.rows(collectives.entries_of(q.shape[0], q.shape[2], context.axis_names))
    ordered = document_scores.by_distance(vertical, slash, spans)
    return Probed(ordered, heads, spans, _mass_fraction(q, context))


def _mass_fraction(q: Array, context: SelectionContext) -> Array | None:
    if context.mass_fraction is None:
        return None
    return context.mass_fraction[collectives.entries_of(q.shape[0], q.shape[2], context.axis_names)]


def per_kind(values: Sequence[int], spans: Spans) -> Array:
    """Stacks a number for columns and one for diagonals: broadcasts with [2, R], or [2, R, E]."""
    return spans.per_row(jnp.array(values, jnp.int32)[:, None])


def each_kind(
    keys: Array,
    rule: top_p.Rule,
    nearest: Callable[[Array, Spans], int | Array],
    spans: Spans,
    most_columns: Array | None = None,
) -> Kept:
    """Selects the largest column keys, and the block diagonals of the largest diagonal keys.

    Keys are uint32 [2, R, NB, g]. `nearest` returns how many block diagonals are always kept, given
    the int32 number of diagonals kept. `most_columns`, int32 [R, E], are additional column limits
    for each sequence.
    """
    if most_columns is not None:
        maximum = jnp.asarray(rule.maximum).at[0].min(most_columns)
        rule = dataclasses.replace(rule, maximum=maximum)
    kept, count = top_p.kept_entries(keys, rule, spans)
    # Distance s = d*g + offset selects block diagonal d, and d+1 unless the offset is 0.
    beyond = kept[1, ..., 1:].any(-1)
    active = kept[1].any(-1) | spans.from_previous(beyond)
    near = nearest(count[1], spans)
    forced = spans.blocks < (near if isinstance(near, int) else spans.spread(near))
    saved = jnp.zeros_like(count[0])
    if rule.mass_target is not None and not rule.keep_crossing:
        masses = (keys[0] & jnp.uint32(rule.mass_mask)).astype(jnp.int32)
        mass = spans.sums((jnp.where(kept[0], masses, 0),))[0]
        saved = (mass >= rule.mass_target).astype(jnp.int32)
    return Kept(kept[0], active | forced, saved)


def lists(
    kept: Kept, capacities: tuple[int, int], sizes: tuple[int, int], context: SelectionContext
) -> tuple[VerticalSlashIndex, Array]:
    """Builds the index of whole sequences from the rows of all ranks, replicated.

    Capacities are those of the lists of columns and of block diagonals, sizes are B and Hq. Also
    returns `Kept.saved` as int32 [B, Hq].
    """
    columns, diagonals, saved = kept
    num_blocks, size = columns.shape[-2:]
    # List padding is larger than every entry.
    tokens = top_p.ascending_entries(columns, capacities[0], num_blocks * size)
    blocks = jnp.where(diagonals, jnp.arange(num_blocks, dtype=jnp.int32), num_blocks)
    parts = jnp.sort(blocks, axis=-1)[:, : capacities[1]], tokens, saved[:, None]
    rows = collectives.from_heads(jnp.concatenate(parts, axis=-1), *sizes, context.axis_names)
    slashes, verticals = rows[..., : capacities[1]], rows[..., capacities[1] : -1]
    index = VerticalSlashIndex(
        slash_blocks=slashes,
        slash_count=(slashes < num_blocks).sum(-1, dtype=jnp.int32),
        vertical_tokens=verticals,
        vertical_count=(verticals < num_blocks * size).sum(-1, dtype=jnp.int32),
        block_size=size,
    )
    return index, rows[..., -1]


def marks(
    kept: Kept,
    spans: PackedSpans,
    documents: DocumentBlocks,
    max_columns: int,
    sizes: tuple[int, int],
    context: SelectionContext,
) -> tuple[BlockMaskIndex, Array]:
    """Builds this rank's rows of the index of packed documents; dense ones keep all their pairs.

    The documents in each row are `spans`, those of each batch entry `documents`. The columns of all
    documents of a sequence have room for `max_columns`. Also returns the sum of `Kept.saved` over
    documents, fp32 [B, Hq].
    """
    rows, num_blocks = context.block_ids, context.num_blocks
    size, inside = kept.columns.shape[-1], spans.inside
    columns = sets.pack(kept.columns & inside[..., None])
    diagonals = sets.pack(kept.diagonals & inside)[:, None]
    saved = kept.saved.sum(-1, dtype=jnp.int32).astype(jnp.uint32)
    parts = [x.reshape(len(inside), -1) for x in (columns, diagonals, saved)]
    gathered = collectives.from_heads(jnp.concatenate(parts, axis=-1), *sizes, context.axis_names)
    words = sets.words_for(num_blocks)
    columns, diagonals = gathered[..., : -words - 1], gathered[..., -words - 1 : -1]
    saved = gathered[..., -1].astype(jnp.float32)

    first = documents.of(rows).first  # [B, n]
    listed = sets.unpack(diagonals, num_blocks) | documents.dense[:, None]
    seen = on_diagonals(listed, first, rows)
    bits = sets.pack(seen) & documents.causal_blocks(rows, num_blocks)
    index = BlockMaskIndex(bits, num_blocks, size)
    if not max_columns:
        return index, saved
    columns = columns.reshape(*sizes, num_blocks, -1)[:, :, rows]
    index = dataclasses.replace(index, column_marks=columns, max_columns=max_columns)
    return index.columns_from(first[:, None]), saved


def on_diagonals(diagonals: Array, first: Array, rows: Array) -> Array:
    """Returns the blocks that rows see on the diagonals of their documents: bool [B, Hq, n, NB].

    Diagonal d of a document is at its d-th block of `diagonals`, bool [B, Hq, NB]; `first`, int32
    [B, n], is the first block of each row's document.
    """
    num_blocks = diagonals.shape[-1]
    blocks = jnp.arange(num_blocks, dtype=jnp.int32)
    # Row r sees key block c if diagonal r - c of its document, at block first + r - c, is kept.
    held_by = jnp.clip(first[..., None] + rows[:, None] - blocks, 0, num_blocks - 1)
    return jax.vmap(lambda kept, block: kept[:, block])(diagonals, held_by)
