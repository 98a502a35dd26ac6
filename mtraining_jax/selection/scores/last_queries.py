"""Steps of a selection with the last queries as probe queries, over all ranks.

Rows are pairs (batch entry, head), and each rank selects for some of them: a search over all ranks
would need a collective for every digit of a score. The selection is bit-identical for any number
of ranks and assignment of blocks. Ties go to the smaller position (columns) or distance
(diagonals). A diagonal at token distance s selects block diagonal floor(s/g) and, unless g divides
s, floor(s/g)+1.

A row is one document, or a pack of several. Documents do not share blocks, so their results are
stored by blocks of the pack: diagonal d of a document at its d-th block.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mtraining_jax.selection import collectives
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.rules import top_p
from mtraining_jax.selection.scores import estimate
from mtraining_jax.selection.segments import OneSegment, Segments
from pallas_kernels.index import BlockMaskIndex, VerticalSlashIndex
from pallas_kernels.index import bits as sets


class ProbeScores(NamedTuple):
    """Scores of the rows of this rank."""

    by_distance: Array  # int32 or fp32 [2, R, NB, g], of columns, and of diagonals by distance
    heads: Array  # int32 [R], the query head of each row
    segments: Segments
    overrides: Mapping[str, Array]  # int32 [R, 1], `SelectionContext.overrides` of each row


class Selected(NamedTuple):
    """The selection for the rows of this rank."""

    columns: Array  # bool [R, NB, g]
    diagonals: Array  # bool [R, NB], block diagonals
    # int32 [R, E], 1 for a document that would be left without columns, since the first one crosses
    # the mass target and is dropped, if the rule had no minimum.
    rescued: Array


def probe(
    q: Array, k: Array, context: SelectionContext, segments: Segments, count: int, by_logits: bool
) -> ProbeScores:
    """Scores columns and diagonals within each document by its last `count` queries.

    Scores are sums of raw logits, or mean softmax masses. With fewer tokens, all queries are used.
    Backends may differ in a score's last bits, so a run should use a single one. `segments` are the
    documents of each batch entry.
    """
    q_last = estimate.last_queries(q, context, segments, count)
    score = estimate.logit_scores if by_logits else estimate.softmax_scores
    (vertical, own, tails), heads = collectives.to_heads(
        score(q_last, k, context, segments), *context.shards
    )
    # Tails never reach another document: the key that holds a diagonal is seen by the last query.
    slash = estimate.join_diagonals(own, tails)
    entries = collectives.entries_of(q.shape[0], q.shape[2], context.axis_names)
    segments = segments.rows(entries)
    overrides = {name: values[entries][:, None] for name, values in context.overrides.items()}
    return ProbeScores(_by_distance(vertical, slash, segments), heads, segments, overrides)


def _by_distance(vertical: Array, slash: Array, segments: Segments) -> Array:
    """Orders scores [R, NB, g] of each document: columns by token, diagonals by distance.

    Diagonals are given at the key that the document's last query sees. Returns [2, R, NB, g],
    distance i of a document at its token i. What follows its tokens is at no visible pair.
    """
    num_blocks, size = vertical.shape[-2:]
    if isinstance(segments, OneSegment):  # reversed and moved, which is cheaper than a gather
        seq_len, slash = num_blocks * size, jnp.flip(slash, axis=(-2, -1))
        if not isinstance(segments.tokens, int):
            # Token V-1-s holds diagonal s; entries that padding would hold move to the end.
            flat = slash.reshape(-1, seq_len)
            slash = jnp.roll(flat, segments.tokens - seq_len, 1).reshape(slash.shape)
        return jnp.stack([vertical, slash])
    start, tokens = segments.start * size, segments.spread(segments.tokens)
    # Distance i is stored at the i-th token before the last one.
    distance = segments.entries(size)
    held_by = jnp.clip((start + tokens - 1)[..., None] - distance, 0, num_blocks * size - 1)
    flat = slash.reshape(len(slash), -1), held_by.reshape(len(slash), -1)
    slash = jnp.take_along_axis(*flat, axis=1).reshape(slash.shape)
    exists = segments.inside[..., None] & (distance < tokens[..., None])
    return jnp.where(exists, jnp.stack([vertical, slash]), 0)


def per_kind(columns: int | Array, diagonals: int) -> Array:
    """Stacks limits of columns, a number or [R, E], and of diagonals: broadcasts with [2, R, E]."""
    column_limits = jnp.broadcast_to(jnp.asarray(columns, jnp.int32), jnp.shape(columns) or (1, 1))
    return jnp.stack([column_limits, jnp.full_like(column_limits, diagonals)])


def each_kind(
    keys: Array,
    rule: top_p.Rule,
    nearest: Callable[[Array, Segments], int | Array],
    segments: Segments,
) -> Selected:
    """Selects the largest column keys, and the block diagonals of the largest diagonal keys.

    Keys are uint32 [2, R, NB, g]. `nearest` returns how many block diagonals are always kept, given
    the int32 number of diagonals kept.
    """
    kept, count = top_p.kept_entries(keys, rule, segments)
    # Distance s = d*g + offset selects block diagonal d, and d+1 unless the offset is 0.
    beyond = kept[1, ..., 1:].any(-1)
    active = kept[1].any(-1) | segments.from_previous(beyond)
    near = nearest(count[1], segments)
    forced = segments.blocks < (near if isinstance(near, int) else segments.spread(near))
    rescued = jnp.zeros_like(count[0])
    if rule.mass_target is not None and not rule.keep_crossing:
        masses = (keys[0] & jnp.uint32(rule.mass_mask)).astype(jnp.int32)
        mass = segments.sums((jnp.where(kept[0], masses, 0),))[0]
        rescued = (mass >= rule.mass_target).astype(jnp.int32)
    return Selected(kept[0], active | forced, rescued)


def lists(
    kept: Selected, capacities: tuple[int, int], sizes: tuple[int, int], context: SelectionContext
) -> tuple[VerticalSlashIndex, Array]:
    """Builds the index of single documents from the rows of all ranks, replicated.

    Capacities are those of the lists of columns and of block diagonals, sizes are B and Hq. Also
    returns `Selected.rescued` as int32 [B, Hq].
    """
    columns, diagonals, rescued = kept
    num_blocks, size = columns.shape[-2:]
    # List padding is larger than every entry.
    tokens = top_p.ascending_entries(columns, capacities[0], num_blocks * size)
    blocks = jnp.where(diagonals, jnp.arange(num_blocks, dtype=jnp.int32), num_blocks)
    parts = jnp.sort(blocks, axis=-1)[:, : capacities[1]], tokens, rescued
    rows = collectives.from_heads(jnp.concatenate(parts, axis=-1), *sizes, context.axis_names)
    slashes, verticals = rows[..., : capacities[1]], rows[..., capacities[1] : -1]
    index = VerticalSlashIndex(
        slash_blocks=slashes,
        slash_count=(slashes < num_blocks).sum(-1, dtype=jnp.int32),
        vertical_tokens=verticals,
        vertical_count=(verticals < num_blocks * size).sum(-1, dtype=jnp.int32),
        block_size=size,
        num_blocks=num_blocks,
    )
    return index, rows[..., -1]


def marks(
    kept: Selected,
    segments: Segments,
    max_columns: int,
    sizes: tuple[int, int],
    context: SelectionContext,
) -> tuple[BlockMaskIndex, Array]:
    """Builds this rank's rows of the index of packed documents; dense ones keep all their pairs.

    The documents in each row are `segments`. The columns of all documents of a sequence have room
    for `max_columns`. Also returns the sum of `Selected.rescued` over documents, fp32 [B, Hq].
    """
    rows, num_blocks, documents = context.block_ids, context.num_blocks, context.documents
    size, inside = kept.columns.shape[-1], segments.inside
    columns = sets.pack(kept.columns & inside[..., None])
    diagonals = sets.pack(kept.diagonals & inside)[:, None]
    rescued = kept.rescued.sum(-1, dtype=jnp.int32).astype(jnp.uint32)
    parts = [x.reshape(len(inside), -1) for x in (columns, diagonals, rescued)]
    gathered = collectives.from_heads(jnp.concatenate(parts, axis=-1), *sizes, context.axis_names)
    words = sets.words_for(num_blocks)
    columns, diagonals = gathered[..., : -words - 1], gathered[..., -words - 1 : -1]
    rescued = gathered[..., -1].astype(jnp.float32)

    assert documents.packed
    first = documents.of(rows).first  # [B, n]
    listed = sets.unpack(diagonals, num_blocks)
    listed |= documents.shorter_than(context.dense_below)[:, None]
    seen = on_diagonals(listed, first, rows)
    bits = sets.pack(seen) & documents.causal_blocks(rows, num_blocks)
    index = BlockMaskIndex(bits, num_blocks, size)
    if not max_columns:
        return index, rescued
    columns = columns.reshape(*sizes, num_blocks, -1)[:, :, rows]
    index = dataclasses.replace(index, column_marks=columns, max_columns=max_columns)
    return index.columns_from(first[:, None]), rescued


def on_diagonals(diagonals: Array, first: Array | None, rows: Array) -> Array:
    """Returns the blocks that rows see on the diagonals of their documents: bool [B, Hq, n, NB].

    Diagonal d of a document is at its d-th block of `diagonals`, bool [B, Hq, NB]; `first`, int32
    [B, n], is the first block of each row's document, None for 0.
    """
    num_blocks = diagonals.shape[-1]
    blocks = jnp.arange(num_blocks, dtype=jnp.int32)
    if first is None:  # the same diagonal in every batch entry
        return diagonals[:, :, jnp.maximum(rows[:, None] - blocks, 0)]
    # Row r sees key block c if diagonal r - c of its document, at block first + r - c, is kept.
    held_by = jnp.clip(first[..., None] + rows[:, None] - blocks, 0, num_blocks - 1)
    return jax.vmap(lambda kept, block: kept[:, block])(diagonals, held_by)
