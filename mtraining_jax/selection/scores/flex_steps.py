"""The steps of FlexPrefill's selection over all ranks, bit-identical for any number of ranks.

Sums are integer sums. Floats that affect the selection are computed elementwise, or by products
with shapes that depend only on the whole sequence (see `estimate.py`).

With `slots`, each document is treated as a sequence: its last queries, its key blocks, one head
type and one cut each. Columns and diagonals are then stored by blocks of the pack, diagonal d of a
document at its d-th block.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.selection import collectives
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.rules import top_p
from mtraining_jax.selection.rules.flex_cut import Rows, largest_within
from mtraining_jax.selection.scores import document_scores, estimate, pooling, row_scores
from mtraining_jax.selection.scores.last_queries import on_diagonals
from mtraining_jax.selection.spans import OneSpan, PackedSpans, Spans

# Queries per pass of the estimate: what its kernels support.
_QUERIES = 64
_DISTANCE_BITS = 28  # the few terms of the divergence, each below 1, sum to less than 2^31


class LastAttention(NamedTuple):
    """Attention of the last queries over their whole sequences, replicated.

    Attributes:
        tokens: int32 [2, B, Hq], or [2, B, Hq, E] with slots, number of largest columns and
            diagonals (by token) within gamma, plus one.
        masses: int32 [2, B, Hq, NB], masses of key blocks and of block distances; total 2^30.
        q_last: [B, E, Hq, g, D], the last queries of each document; None without slots.
    """

    tokens: Array
    masses: Array
    q_last: Array | None = None


def last_attention(
    q: Array,
    k: Array,
    context: SelectionContext,
    block_size: int,
    gamma: float,
    slots: PackedSpans | None,
) -> LastAttention:
    """Computes masses of columns and diagonals from the last `block_size` queries."""
    batch, heads = q.shape[0], q.shape[2]
    # As many queries a pass as kernels support. Equal passes: the mean of means is the mean of all.
    passes = block_size // _QUERIES if block_size % _QUERIES == 0 else 1
    count = block_size // passes
    if slots is None:
        scores, spans = _of_sequences(q, k, context, block_size, passes, count)
        found = _counted(scores, gamma, spans, (batch, heads), context.axis_names)
        return found._replace(tokens=found.tokens[..., 0])
    q_last = document_scores.last_queries(q, slots, context, block_size)
    scores, spans = _of_documents(q_last, k, context, passes, slots)
    found = _counted(scores, gamma, spans, (batch, heads), context.axis_names)
    return found._replace(q_last=q_last)


def _of_sequences(
    q: Array, k: Array, context: SelectionContext, block_size: int, passes: int, count: int
) -> tuple[list[Array], OneSpan]:
    """Returns masses int32 [2, R, NB, g] by distance of each pass, and the sequences."""
    ids, num_blocks, axes = context.block_ids, context.num_blocks, context.axis_names
    seq_len = num_blocks * block_size
    end = jnp.int32(seq_len) if context.valid_len is None else context.valid_len
    ends = [end - i * count for i in range(passes)]
    parts = []
    for last in ends:
        positions = estimate.last_positions(count, last)
        q_last = collectives.gather_rows(q, positions, ids, num_blocks, axes)
        parts += estimate.softmax_scores(
            q_last.transpose(0, 2, 1, 3),
            k,
            scale=context.scale_for(q.shape[3]),
            backend=context.backend,
            axis_names=axes,
            valid_len=last,
            block_ids=ids,
            num_blocks=num_blocks,
        )
    whole, _ = collectives.to_heads(parts, ids, num_blocks, axes)
    scores = []
    for number, last in enumerate(ends):
        columns, own, tails = whole[3 * number : 3 * number + 3]
        # Token V-1-s stores diagonal s; after flip and roll, diagonal s is entry s.
        slash = jnp.flip(estimate.join_diagonals(own, tails), axis=(-2, -1))
        flat = jnp.roll(slash.reshape(slash.shape[0], -1), last - seq_len, 1)
        scores.append(jnp.stack([columns, flat.reshape(slash.shape)]) // passes)
    return scores, OneSpan(num_blocks, jnp.minimum(end, seq_len))


def _of_documents(
    q_last: Array, k: Array, context: SelectionContext, passes: int, slots: PackedSpans
) -> tuple[list[Array], PackedSpans]:
    """Variant of `_of_sequences` for documents of at least g tokens, given their last g queries."""
    axes, (batch, _, heads, size, _) = context.axis_names, q_last.shape
    count = size // passes
    # Each pass has the queries before an earlier end of each document.
    tokens = [jnp.maximum(slots.tokens - i * count, 0) for i in range(passes)]
    parts = []
    for number, ends in enumerate(tokens):
        own = q_last[:, :, :, size - (number + 1) * count : size - number * count]
        of_pass = dataclasses.replace(slots, tokens=ends)
        parts += document_scores.softmax_scores(own, k, of_pass, context)
    whole, _ = collectives.to_heads(parts, context.block_ids, context.num_blocks, axes)
    entries = collectives.entries_of(batch, heads, axes)
    spans = slots.rows(entries)
    scores = []
    for number, ends in enumerate(tokens):
        columns, own, tails = whole[3 * number : 3 * number + 3]
        of_pass = dataclasses.replace(spans, tokens=ends[entries])
        slash = estimate.join_diagonals(own, tails)
        scores.append(document_scores.by_distance(columns, slash, of_pass) // passes)
    return scores, spans


def _counted(
    scores: list[Array],
    gamma: float,
    spans: Spans,
    sizes: tuple[int, int],
    axis_names: collectives.AxisNames,
) -> LastAttention:
    """Collects results on all ranks from summands int32 [2, R, NB, g] distributed by heads.

    E is 1 in the result if rows are single sequences.
    """
    masses = sum(scores[1:], scores[0])
    rule = top_p.Rule(
        minimum=0,
        maximum=spans.tokens,
        mass_target=min(round(gamma * estimate.MASS_ONE) + 1, (1 << 31) - 1),
        mass_mask=(1 << 31) - 1,
        keep_crossing=False,
    )
    _, within = top_p.kept_entries(masses.astype(jnp.uint32), rule, spans)
    of_blocks = masses.sum(-1, dtype=jnp.int32)
    packed = jnp.concatenate([within.reshape(*of_blocks.shape[:2], -1) + 1, of_blocks], axis=-1)
    packed = jnp.moveaxis(packed, 0, 1).reshape(packed.shape[1], -1)
    found = collectives.from_heads(packed, *sizes, axis_names)
    found = jnp.moveaxis(found.reshape(*found.shape[:2], 2, -1), 2, 0)
    num_blocks = of_blocks.shape[-1]
    return LastAttention(found[..., :-num_blocks], found[..., -num_blocks:])


def largest(masses: Array, counts: Array, spans: Spans | None = None) -> Array:
    """Marks the `counts` blocks of largest mass, int32 [..., NB], of each sequence: bool.

    Its first block ranks first; ties go to the smaller number. Undefined for blocks of no sequence.
    """
    own: Spans = OneSpan(masses.shape[-1], 0) if spans is None else spans
    keys = jnp.where(own.blocks == 0, jnp.uint32(1 << 31), masses.astype(jnp.uint32))
    rule = top_p.Rule(minimum=0, maximum=counts)
    return top_p.kept_entries(keys[..., None], rule, own)[0][..., 0]


def kept_blocks(
    found: LastAttention, counts: Array, context: SelectionContext, slots: PackedSpans | None
) -> Array:
    """Returns the blocks on the columns and diagonals of largest mass: bool [B, Hq, n, NB].

    `counts`, int32 like `found.tokens`, are the numbers of column blocks and of diagonals, at least
    1. Undefined for rows without a slot and for blocks of other documents.
    """
    rows, masses = context.block_ids, found.masses
    if slots is None:
        columns, diagonals = largest(masses, counts)
        lag = jnp.maximum(rows[:, None] - jnp.arange(context.num_blocks, dtype=jnp.int32), 0)
        return columns[:, :, None] | diagonals[:, :, lag]
    _, batch, heads, num_blocks = masses.shape
    flat = masses.reshape(2, -1, num_blocks), counts.reshape(2, batch * heads, -1)
    columns, diagonals = largest(*flat, slots.repeat(heads)).reshape(masses.shape)
    first = context.first_blocks(rows)
    assert first is not None
    return columns[:, :, None] | on_diagonals(diagonals, first, rows)


def distances(
    q: Array, k: Array, context: SelectionContext, found: LastAttention, slots: PackedSpans | None
) -> Array:
    """Computes Jensen-Shannon distances between pooled and actual attention of the last queries.

    Returns fp32 [B, Hq], or [B, Hq, E] with slots, from 0 to sqrt(ln 2), replicated.
    """
    size, dim = q.shape[1] // context.block_ids.shape[0], q.shape[-1]
    keys = key_means(k, context)
    batch, kv_heads, num_blocks, _ = keys.shape
    if slots is None:
        end = context.num_blocks * size if context.valid_len is None else context.valid_len
        positions = estimate.last_positions(size, end)
        last = collectives.gather_rows(
            q, positions, context.block_ids, context.num_blocks, context.axis_names
        )
        seen = jnp.where((positions >= 0)[:, None, None], last.astype(jnp.float32), 0.0)
        count = jnp.minimum(end, size)
        mean = estimate.ordered_sum(seen.transpose(0, 2, 1, 3)) / jnp.asarray(count, jnp.float32)
        logits = lax.dot_general(
            mean.reshape(batch, kv_heads, -1, dim),
            keys,
            (((3,), (3,)), ((0, 1), (0, 1))),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        ).reshape(batch, -1, num_blocks)
        exists = jnp.arange(num_blocks, dtype=jnp.int32) * size < end
        logits = jnp.where(exists, logits, -jnp.inf)
        terms = estimate.relative_exp(logits, logits.max(-1, keepdims=True), context.scale_for(dim))
        return distance(terms, found.masses[0], OneSpan(num_blocks, end))
    q_last = found.q_last
    assert q_last is not None
    means = estimate.ordered_sum(q_last.astype(jnp.float32)) / jnp.float32(size)  # [B, E, Hq, D]
    held = jnp.minimum(slots.of_block, slots.slots - 1)
    own = jax.vmap(lambda means, slot: means[slot])(means, held)  # [B, NB, Hq, D]
    keys = keys.swapaxes(1, 2)  # [B, NB, Hk, D]
    # Each block is a separate product, with the last queries of its document only.
    logits = lax.dot_general(
        own.reshape(*keys.shape[:3], -1, dim),
        keys,
        (((4,), (3,)), ((0, 1, 2), (0, 1, 2))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    logits = logits.reshape(*own.shape[:3]).swapaxes(1, 2)
    rows = logits.reshape(-1, num_blocks)
    spans = slots.repeat(q.shape[2])
    lowest = jnp.full((rows.shape[0], slots.slots + 1), -jnp.inf)
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    peaks = spans.spread(lowest.at[row, spans.of_block].max(rows)[:, :-1])
    terms = estimate.relative_exp(rows, peaks, context.scale_for(dim))
    result = distance(terms, found.masses[0].reshape(rows.shape), spans)
    return result.reshape(*logits.shape[:2], -1)


def pooled_lists(
    q: Array, k: Array, context: SelectionContext, gamma: float, slots: PackedSpans | None
) -> Array:
    """Marks the largest entries of pooled attention over all rows, within gamma of the total.

    Returns bool [B, Hq, n/g, NB] of the local rows; undefined for rows without a slot and for
    blocks of other documents than the row's.
    """
    size, places = q.shape[1] // context.block_ids.shape[0], context.block_ids
    ends = context.ends(places, size)
    if ends is not None:
        places = jnp.where(places * size < ends, places, -1)
    queries = pooling.block_means(q, context.block_ids, ends)
    keys = key_means(k, context)
    shares = row_scores.block_masses(
        queries[:, :, :, None],
        keys[:, :, :, None],
        places[..., None],
        context.first_blocks(context.block_ids),
        scale=context.scale_for(q.shape[3]),
        like=q,
        backend="xla",  # one product per 128^2 pairs
    )
    mass = jnp.round(shares * estimate.MASS_ONE).astype(jnp.uint32)
    if slots is not None:
        num_rows = slots.length[:, None]
    elif context.valid_len is None:
        num_rows = context.num_blocks
    else:
        num_rows = -(-context.valid_len // size)
    return largest_within(mass, gamma, num_rows, Rows(context, slots))


def key_means(k: Array, context: SelectionContext) -> Array:
    """Computes the mean key of every key block: fp32 [B, Hk, NB, D], replicated."""
    ends = context.ends(context.block_ids, k.shape[1] // context.block_ids.shape[0])
    means = pooling.block_means(k, context.block_ids, ends).transpose(0, 2, 1, 3)
    where = context.block_ids, context.num_blocks, context.axis_names
    return collectives.all_blocks(means, *where).transpose(0, 2, 1, 3)


def distance(terms: Array, block_masses: Array, spans: Spans) -> Array:
    """Computes Jensen-Shannon distances of two distributions over the blocks of each sequence.

    They are given as fp32 [..., R, NB] from 0 to 1, and int32 of total 2^30, up to a factor.
    Returns fp32 for each sequence: the root of the divergence, natural logarithm.
    """
    return _distance(
        _shares(terms, spans), _shares(block_masses.astype(jnp.float32) * 2.0**-30, spans), spans
    )


def _shares(x: Array, spans: Spans) -> Array:
    """Normalizes numbers of at most 1 by their sum over a sequence, an integer sum."""
    length = spans.total(jnp.ones_like(x, jnp.int32))
    one = jnp.int32(1) << (lax.clz(jnp.maximum(length - 1, 0)) - 2)
    one = one.astype(jnp.float32)  # keeps the sum of all terms within 2^30
    whole = spans.total(jnp.round(x * spans.spread(one)).astype(jnp.int32))
    total = jnp.maximum(whole.astype(jnp.float32) * (1 / one), 1e-30)
    return x / spans.spread(total)


def _distance(p: Array, q: Array, spans: Spans) -> Array:
    """Computes `distance` from normalized distributions."""

    def terms(x: Array, y: Array) -> Array:
        ratio = jnp.where(x > 0, 2 * x / jnp.maximum(x + y, 1e-30), 1.0)
        scaled = x * jnp.log(ratio) * float(1 << _DISTANCE_BITS)
        return jnp.round(scaled).astype(jnp.int32)

    both = spans.total(terms(p, q) + terms(q, p))
    return jnp.sqrt(jnp.maximum(both, 0).astype(jnp.float32) * 2.0 ** -(_DISTANCE_BITS + 1))
