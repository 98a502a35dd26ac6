"""FlexPrefill's cut: the largest entries of all rows of a document together, over all ranks.

Entries and sums are integers, so the cut is bit-identical for any number of ranks.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.selection import collectives
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.rules.row_rule import first_of
from mtraining_jax.selection.spans import OneSpan, Spans
from pallas_kernels.index import bits as sets

_GAMMA_BITS = 15
_LIMB = 16


def largest_within(
    mass: Array, gamma: float, num_rows: int | Array, spans: Spans, context: SelectionContext
) -> Array:
    """Marks the largest entries of each document with a sum within a fraction of the total.

    Entries of the local rows are uint32 [B, Hq, n, NB], 2^30 in each row and below 2^31. The
    fraction `gamma` is a multiple of 2^-15, `spans` are the `local` documents, each of `num_rows`
    rows. The entry that crosses the limit is dropped; ties go to the earlier row and within a row
    to the earlier entry. Returns bool [B, Hq, n, NB], undefined for rows of no document.
    """
    # gamma * num_rows * 2^30 in limbs of 16 bits: below 2^46.
    target = round(gamma * (1 << _GAMMA_BITS)) * jnp.asarray(num_rows, jnp.uint32)
    high, low = target >> 1, (target & 1) << (_LIMB - 1)

    def sums(candidates: Array) -> tuple[Array, Array, Array]:
        """Sums the entries that reach candidates uint32 [B, Hq, E]; returns limbs and the mask."""
        reached = mass >= spans.spread(candidates)[..., None]
        row_sums = jnp.where(reached, mass, 0).sum(-1, dtype=jnp.uint32)
        limbs = row_sums >> _LIMB, row_sums & ((1 << _LIMB) - 1)
        upper, lower = collectives.exact_sum(
            tuple(_sums_of_rows(x, spans) for x in limbs), context.axis_names
        )
        return upper + (lower >> _LIMB), lower & ((1 << _LIMB) - 1), reached

    # Searches bit by bit for the smallest mass above which all entries are within the target: all
    # entries that reach `too_low` exceed it, or it is 0.
    def narrow(step: Array, too_low: Array) -> Array:
        candidate = too_low + (jnp.uint32(1) << (30 - step).astype(jnp.uint32))
        upper, lower, _ = sums(candidate)
        within = (upper < high) | ((upper == high) & (lower <= low))
        return jnp.where(within, too_low, candidate)

    none = jnp.zeros((*mass.shape[:2], spans.slots), jnp.uint32)
    cut = lax.fori_loop(0, 31, narrow, none)
    upper, lower, above = sums(cut + 1)
    of_rows = spans.spread(cut)[..., None]
    equal = (mass == of_rows) & (of_rows > 0)
    # Number of entries equal to the cut that fit into the rest, by exact division in limbs.
    borrow = (low < lower).astype(jnp.uint32)
    missing = high - upper - borrow, low + (borrow << _LIMB) - lower
    room = _quotient(*missing, jnp.maximum(cut, 1))
    before = _in_earlier_rows(equal.sum(-1, dtype=jnp.int32), spans, context)
    kept = first_of(sets.pack(equal), jnp.maximum(spans.spread(room) - before, 0))
    return above | sets.unpack(kept, mass.shape[-1])


def _sums_of_rows(x: Array, spans: Spans) -> Array:
    """Sums integers [B, Hq, n] over the local rows of each document: [B, Hq, E]."""
    if isinstance(spans, OneSpan):
        return x.sum(-1, keepdims=True, dtype=x.dtype)
    zeros = jnp.zeros((x.shape[1], spans.slots), x.dtype)  # local rows have no order
    return jax.vmap(lambda values, slot: zeros.at[:, slot].add(values, mode="drop"))(
        x, spans.of_block[:, 0]
    )


def _in_earlier_rows(x: Array, spans: Spans, context: SelectionContext) -> Array:
    """Sums int32 [B, Hq, n] over the earlier rows of the same document, on all ranks."""
    block_ids, num_blocks, axis_names = context.shards
    all_rows = jnp.zeros((*x.shape[:2], num_blocks), jnp.int32)
    all_rows = collectives.exact_sum(all_rows.at[..., block_ids].set(x), axis_names)
    running = jnp.cumsum(all_rows, -1, dtype=jnp.int32) - all_rows
    if isinstance(spans, OneSpan):
        return running[..., block_ids]
    first = jnp.broadcast_to(spans.first, (*x.shape[:2], spans.slots))
    begun = jnp.take_along_axis(running, first, axis=-1, mode="clip")
    return running[..., block_ids] - spans.spread(begun)


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
