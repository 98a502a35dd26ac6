"""The steps of FlexPrefill's selection over all ranks, bit-identical for any number of ranks.

Sums are integer sums. Floats that affect the selection are computed elementwise, or by products
with shapes that depend only on the whole sequence (see `estimate.py`).

Each document has its own last queries, key blocks, head types and cut. Columns and diagonals are
stored by blocks of the pack, diagonal d of a document at its d-th block.
"""

import dataclasses
import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.selection import collectives
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.rules import top_p
from mtraining_jax.selection.rules.row_rule import first_of
from mtraining_jax.selection.scores import estimate, last_queries, pooling, row_scores
from mtraining_jax.selection.segments import OneSegment, Segments
from pallas_kernels.index import bits as sets

# Queries per pass of the estimate: what its kernels support.
_QUERIES = 64
_DISTANCE_BITS = 28  # the few terms of the divergence, each below 1, sum to less than 2^31
_GAMMA_BITS = 15
_LIMB = 16


class LastAttention(NamedTuple):
    """Attention of the last queries over their whole documents, replicated."""

    # int32 [2, B, Hq, E], number of largest columns and diagonals (by token) within gamma, plus one
    tokens: Array
    masses: Array  # int32 [2, B, Hq, NB], of key blocks and of block distances; total 2^30


def last_attention(
    q: Array, k: Array, context: SelectionContext, segments: Segments, block_size: int, gamma: float
) -> LastAttention:
    """Computes masses of columns and diagonals from the last `block_size` queries.

    Packed documents in `segments` have at least that many tokens.
    """
    # As many queries a pass as kernels support. Equal passes: the mean of means is the mean of all.
    passes = block_size // _QUERIES if block_size % _QUERIES == 0 else 1
    count = block_size // passes
    probes = []
    for number in range(passes):
        # Each pass has the queries before an earlier end.
        tokens = jnp.maximum(segments.tokens - number * count, 0)
        pass_segments = dataclasses.replace(segments, tokens=tokens)
        probes.append(last_queries.probe(q, k, context, pass_segments, count, False))
    masses = functools.reduce(operator.add, (x.by_distance // passes for x in probes))
    segments = probes[0].segments
    rule = top_p.Rule(
        minimum=0,
        maximum=segments.tokens,
        mass_target=min(round(gamma * estimate.MASS_ONE) + 1, (1 << 31) - 1),
        mass_mask=(1 << 31) - 1,
        keep_crossing=False,
    )
    _, within = top_p.kept_entries(masses.astype(jnp.uint32), rule, segments)
    packed = jnp.concatenate([within + 1, masses.sum(-1, dtype=jnp.int32)], axis=-1)
    packed = jnp.moveaxis(packed, 0, 1).reshape(packed.shape[1], -1)
    packed = collectives.from_heads(packed, q.shape[0], q.shape[2], context.axis_names)
    packed = jnp.moveaxis(packed.reshape(*packed.shape[:2], 2, -1), 2, 0)
    return LastAttention(packed[..., : segments.slots], packed[..., segments.slots :])


def kept_blocks(
    last: LastAttention, counts: Array, context: SelectionContext, segments: Segments
) -> Array:
    """Returns the blocks on the columns and diagonals of largest mass: bool [B, Hq, n, NB].

    `counts`, int32 like `last.tokens`, are the numbers of column blocks and of diagonals, at least
    1. Undefined for rows without a document and for blocks of other documents.
    """
    _, batch, heads, num_blocks = last.masses.shape
    masses = last.masses.reshape(2, -1, num_blocks)
    segments = segments.repeat(heads)
    # The first block ranks first; ties go to the smaller number.
    keys = jnp.where(segments.blocks == 0, jnp.uint32(1 << 31), masses.astype(jnp.uint32))
    rule = top_p.Rule(minimum=0, maximum=counts.reshape(2, batch * heads, -1))
    largest, _ = top_p.kept_entries(keys[..., None], rule, segments)
    columns, diagonals = largest.reshape(last.masses.shape)
    rows = context.block_ids
    on_diagonals = last_queries.on_diagonals(diagonals, context.first_blocks(rows), rows)
    return columns[:, :, None] | on_diagonals


def distances(
    q: Array, k: Array, context: SelectionContext, last: LastAttention, segments: Segments
) -> Array:
    """Computes Jensen-Shannon distances between pooled and actual attention of the last queries.

    Returns fp32 [B, Hq, E] from 0 to sqrt(ln 2), replicated.
    """
    size, heads = q.shape[1] // context.block_ids.shape[0], q.shape[2]
    keys = key_means(k, context)
    batch, kv_heads, num_blocks, dim = keys.shape
    queries = estimate.last_queries(q, context, segments, size).astype(jnp.float32)
    count = jnp.asarray(jnp.minimum(segments.tokens, size), jnp.float32)
    if isinstance(segments, OneSegment):
        exists = estimate.last_positions(segments, size, size) >= 0
        queries = jnp.where(exists[:, :, None, :, None], queries, 0.0)
        means = (estimate.ordered_sum(queries) / count).reshape(batch, kv_heads, -1, dim)
        logits = _products(means, keys, 2).reshape(-1, num_blocks)
        logits = jnp.where(segments.blocks * size < segments.tokens, logits, -jnp.inf)
    else:
        # Each block is a separate product, with the last queries of its document only.
        means = estimate.ordered_sum(queries) / jnp.float32(size)  # [B, E, Hq, D]
        slot = jnp.minimum(segments.slot_of_block, segments.slots - 1)
        means = jax.vmap(lambda means, slot: means[slot])(means, slot)  # [B, NB, Hq, D]
        means = means.reshape(batch, num_blocks, kv_heads, -1, dim)
        logits = _products(means, keys.swapaxes(1, 2)[..., None, :], 3)
        logits = logits.reshape(batch, num_blocks, -1).swapaxes(1, 2).reshape(-1, num_blocks)
    segments = segments.repeat(heads)
    peaks = segments.spread(segments.highest(logits))
    terms = estimate.relative_exp(logits, peaks, context.scale_for(dim))
    result = distance(terms, last.masses[0].reshape(logits.shape), segments)
    return result.reshape(batch, heads, -1)


def _products(x: Array, y: Array, num_batch: int) -> Array:
    """Multiplies rows [..., m, D] and [..., n, D] in fp32: [..., m, n]."""
    batch = tuple(range(num_batch))
    return lax.dot_general(
        x,
        y,
        (((num_batch + 1,), (num_batch + 1,)), (batch, batch)),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def pooled_lists(
    q: Array, k: Array, context: SelectionContext, gamma: float, segments: Segments
) -> Array:
    """Marks the largest entries of pooled attention over all rows, within gamma of the total.

    Returns bool [B, Hq, n/g, NB] of the local rows; undefined for rows without a document and for
    blocks of other documents than the row's.
    """
    size, positions = q.shape[1] // context.block_ids.shape[0], context.block_ids
    ends = context.ends(positions)
    if ends is not None:
        positions = jnp.where(positions * size < ends, positions, -1)
    queries = pooling.block_means(q, context.block_ids, ends)
    keys = key_means(k, context)
    masses = row_scores.block_masses(
        queries[:, :, :, None],
        keys[:, :, :, None],
        positions[..., None],
        context.first_blocks(context.block_ids),
        scale=context.scale_for(q.shape[3]),
        like=q,
        backend="xla",  # one product per 128^2 pairs
    )
    mass = jnp.round(masses * estimate.MASS_ONE).astype(jnp.uint32)
    segments = segments.local(context.block_ids)
    return largest_within(mass, gamma, -(-segments.tokens // size), segments, context)


def key_means(k: Array, context: SelectionContext) -> Array:
    """Computes the mean key of every key block: fp32 [B, Hk, NB, D], replicated."""
    ends = context.ends(context.block_ids)
    means = pooling.block_means(k, context.block_ids, ends).transpose(0, 2, 1, 3)
    return collectives.all_blocks(means, *context.shards).transpose(0, 2, 1, 3)


def distance(terms: Array, block_masses: Array, segments: Segments) -> Array:
    """Computes Jensen-Shannon distances of two distributions over the blocks of each document.

    They are given as fp32 [..., R, NB] from 0 to 1, and int32 of total 2^30, up to a factor.
    Returns fp32 for each document: the root of the divergence, natural logarithm.
    """
    p = _normalized(terms, segments)
    q = _normalized(block_masses.astype(jnp.float32) * 2.0**-30, segments)

    def parts(x: Array, y: Array) -> Array:
        ratio = jnp.where(x > 0, 2 * x / jnp.maximum(x + y, 1e-30), 1.0)
        scaled = x * jnp.log(ratio) * float(1 << _DISTANCE_BITS)
        return jnp.round(scaled).astype(jnp.int32)

    both = segments.total(parts(p, q) + parts(q, p))
    return jnp.sqrt(jnp.maximum(both, 0).astype(jnp.float32) * 2.0 ** -(_DISTANCE_BITS + 1))


def _normalized(x: Array, segments: Segments) -> Array:
    """Normalizes numbers of at most 1 by their sum over a document, an integer sum."""
    length = segments.total(jnp.ones_like(x, jnp.int32))
    one = jnp.int32(1) << (lax.clz(jnp.maximum(length - 1, 0)) - 2)
    one = one.astype(jnp.float32)  # keeps the sum of all terms within 2^30
    whole = segments.total(jnp.round(x * segments.spread(one)).astype(jnp.int32))
    total = jnp.maximum(whole.astype(jnp.float32) * (1 / one), 1e-30)
    return x / segments.spread(total)


def largest_within(
    mass: Array, gamma: float, num_rows: int | Array, segments: Segments, context: SelectionContext
) -> Array:
    """Marks the largest entries of each document with a sum within a fraction of the total.

    Entries of the local rows are uint32 [B, Hq, n, NB], 2^30 in each row and below 2^31. The
    fraction `gamma` is a multiple of 2^-15, `segments` are the `local` documents, each of
    `num_rows` rows. The entry that crosses the limit is dropped; ties go to the earlier row and
    within a row to the earlier entry. Returns bool [B, Hq, n, NB], undefined for rows of no
    document.
    """
    # gamma * num_rows * 2^30 in limbs of 16 bits: below 2^46.
    target = round(gamma * (1 << _GAMMA_BITS)) * jnp.asarray(num_rows, jnp.uint32)
    high, low = target >> 1, (target & 1) << (_LIMB - 1)

    def sums(candidates: Array) -> tuple[Array, Array, Array]:
        """Sums the entries that reach candidates uint32 [B, Hq, E]; returns limbs and the mask."""
        reached = mass >= segments.spread(candidates)[..., None]
        row_sums = jnp.where(reached, mass, 0).sum(-1, dtype=jnp.uint32)
        limbs = row_sums >> _LIMB, row_sums & ((1 << _LIMB) - 1)
        upper, lower = collectives.exact_sum(
            tuple(_sums_of_rows(x, segments) for x in limbs), context.axis_names
        )
        return upper + (lower >> _LIMB), lower & ((1 << _LIMB) - 1), reached

    # Searches bit by bit for the smallest mass above which all entries are within the target: all
    # entries that reach `too_low` exceed it, or it is 0.
    def narrow(step: Array, too_low: Array) -> Array:
        candidate = too_low + (jnp.uint32(1) << (30 - step).astype(jnp.uint32))
        upper, lower, _ = sums(candidate)
        within = (upper < high) | ((upper == high) & (lower <= low))
        return jnp.where(within, too_low, candidate)

    none = jnp.zeros((*mass.shape[:2], segments.slots), jnp.uint32)
    cut = lax.fori_loop(0, 31, narrow, none)
    upper, lower, above = sums(cut + 1)
    row_cuts = segments.spread(cut)[..., None]
    equal = (mass == row_cuts) & (row_cuts > 0)
    # Number of entries equal to the cut that fit into the rest, by exact division in limbs.
    borrow = (low < lower).astype(jnp.uint32)
    missing = high - upper - borrow, low + (borrow << _LIMB) - lower
    room = _quotient(*missing, jnp.maximum(cut, 1))
    before = _in_earlier_rows(equal.sum(-1, dtype=jnp.int32), segments, context)
    kept = first_of(sets.pack(equal), jnp.maximum(segments.spread(room) - before, 0))
    return above | sets.unpack(kept, mass.shape[-1])


def _sums_of_rows(x: Array, segments: Segments) -> Array:
    """Sums integers [B, Hq, n] over the local rows of each document: [B, Hq, E]."""
    if isinstance(segments, OneSegment):
        return x.sum(-1, keepdims=True, dtype=x.dtype)
    zeros = jnp.zeros((x.shape[1], segments.slots), x.dtype)  # local rows have no order
    return jax.vmap(lambda values, slot: zeros.at[:, slot].add(values, mode="drop"))(
        x, segments.slot_of_block[:, 0]
    )


def _in_earlier_rows(x: Array, segments: Segments, context: SelectionContext) -> Array:
    """Sums int32 [B, Hq, n] over the earlier rows of the same document, on all ranks."""
    block_ids, num_blocks, axis_names = context.shards
    all_rows = jnp.zeros((*x.shape[:2], num_blocks), jnp.int32)
    all_rows = collectives.exact_sum(all_rows.at[..., block_ids].set(x), axis_names)
    running = jnp.cumsum(all_rows, -1, dtype=jnp.int32) - all_rows
    if isinstance(segments, OneSegment):
        return running[..., block_ids]
    first = jnp.broadcast_to(segments.first, (*x.shape[:2], segments.slots))
    begun = jnp.take_along_axis(running, first, axis=-1, mode="clip")
    return running[..., block_ids] - segments.spread(begun)


def _quotient(high: Array, low: Array, by: Array) -> Array:
    """Returns (high * 2^16 + low) // by, at most 2^30, as int32; `by` uint32 in 1 .. 2^31 - 1.

    Long division bit by bit, since 64-bit integers are not available.
    """
    most = jnp.uint32(1 << 30)

    def digit(step: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        rest, quotient = state
        position = (47 - step).astype(jnp.uint32)
        bit = jnp.where(
            position >= _LIMB, high >> (jnp.maximum(position, _LIMB) - _LIMB), low >> position
        )
        rest = (rest << 1) | (bit & 1)
        fits = rest >= by
        quotient = jnp.minimum((quotient << 1) | fits, most)
        return jnp.where(fits, rest - by, rest), quotient

    zero = jnp.zeros(jnp.broadcast_shapes(high.shape, by.shape), jnp.uint32)
    return lax.fori_loop(0, 48, digit, (zero, zero))[1].astype(jnp.int32)
