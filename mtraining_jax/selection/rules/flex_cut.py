"""FlexPrefill's cut: the largest entries of all rows of a sequence together, over all ranks.

Entries and sums are integers, so the cut is bit-identical for any number of ranks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.selection import collectives
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.rules.row_rule import first_of
from mtraining_jax.selection.spans import PackedSpans
from pallas_kernels.index import bits as sets

_GAMMA_BITS = 15
_LIMB = 16


class Rows(NamedTuple):
    """The sequences that rows of blocks belong to: documents, or one (E is 1) without slots."""

    context: SelectionContext
    slots: PackedSpans | None

    @property
    def sequences(self) -> int:
        """E."""
        return 1 if self.slots is None else self.slots.slots

    def spread(self, x: Array) -> Array:
        """Looks up [B, Hq, E] for the sequence of each row: broadcasts with [B, Hq, n]."""
        if self.slots is None:
            return x
        slot = jnp.minimum(self._slot, self.sequences - 1)
        return jax.vmap(lambda values, slot: values[:, slot])(x, slot)

    def local_sums(self, x: Array) -> Array:
        """Sums integers [B, Hq, n] over the local rows of each sequence: [B, Hq, E]."""
        if self.slots is None:
            return x.sum(-1, keepdims=True, dtype=x.dtype)
        zeros = jnp.zeros((x.shape[1], self.sequences), x.dtype)
        return jax.vmap(lambda values, slot: zeros.at[:, slot].add(values, mode="drop"))(
            x, self._slot
        )

    def before(self, x: Array) -> Array:
        """Sums int32 [B, Hq, n] over the earlier rows of the same sequence, on all ranks."""
        ids = self.context.block_ids
        all_rows = jnp.zeros((*x.shape[:2], self.context.num_blocks), jnp.int32)
        all_rows = collectives.exact_sum(all_rows.at[..., ids].set(x), self.context.axis_names)
        running = jnp.cumsum(all_rows, -1, dtype=jnp.int32) - all_rows
        if self.slots is None:
            return running[..., ids]
        first = jnp.minimum(self.slots.first, self.context.num_blocks - 1)
        begun = jax.vmap(lambda values, first: values[:, first])(running, first)
        return running[..., ids] - self.spread(begun)

    @property
    def _slot(self) -> Array:
        """Slot of each local row: int32 [B, n]; E for a row without one."""
        assert self.slots is not None
        return self.slots.of_block[:, self.context.block_ids]


def largest_within(mass: Array, gamma: float, num_rows: int | Array, rows: Rows) -> Array:
    """Marks the largest entries of each sequence whose sum stays within a fraction of the total.

    Args:
        mass: uint32 [B, Hq, n, NB], entries of the local rows, 2^30 in each row; below 2^31.
        gamma: fraction of the total to keep; multiples of 2^-15.
        num_rows: int32, broadcasts with [B, Hq, E]: rows of each sequence.
        rows: the sequences that the local rows belong to.

    Returns:
        bool [B, Hq, n, NB]. The entry that crosses the limit is dropped; ties go to the earlier row
        and within a row to the earlier entry. Undefined for rows of no sequence.
    """
    # gamma * num_rows * 2^30 in limbs of 16 bits: below 2^46.
    target = round(gamma * (1 << _GAMMA_BITS)) * jnp.asarray(num_rows, jnp.uint32)
    high, low = target >> 1, (target & 1) << (_LIMB - 1)

    def sums(candidates: Array) -> tuple[Array, Array, Array]:
        """Sums the entries that reach candidates uint32 [B, Hq, E]; returns limbs and the mask."""
        reached = mass >= rows.spread(candidates)[..., None]
        row_sums = jnp.where(reached, mass, 0).sum(-1, dtype=jnp.uint32)
        limbs = row_sums >> _LIMB, row_sums & ((1 << _LIMB) - 1)
        upper, lower = collectives.exact_sum(
            tuple(rows.local_sums(x) for x in limbs), rows.context.axis_names
        )
        return upper + (lower >> _LIMB), lower & ((1 << _LIMB) - 1), reached

    # Searches bit by bit for the smallest mass above which all entries are within the target: all
    # entries that reach `too_low` exceed it, or it is 0.
    def narrow(step: Array, too_low: Array) -> Array:
        candidate = too_low + (jnp.uint32(1) << (30 - step).astype(jnp.uint32))
        upper, lower, _ = sums(candidate)
        within = (upper < high) | ((upper == high) & (lower <= low))
        return jnp.where(within, too_low, candidate)

    none = jnp.zeros((*mass.shape[:2], rows.sequences), jnp.uint32)
    cut = lax.fori_loop(0, 31, narrow, none)
    upper, lower, above = sums(cut + 1)
    equal = (mass == rows.spread(cut)[..., None]) & (rows.spread(cut) > 0)[..., None]
    # Number of entries equal to the cut that fit into the rest, by exact division in limbs.
    borrow = (low < lower).astype(jnp.uint32)
    missing = high - upper - borrow, low + (borrow << _LIMB) - lower
    room = _quotient(*missing, jnp.maximum(cut, 1))
    before = rows.before(equal.sum(-1, dtype=jnp.int32))
    kept = first_of(sets.pack(equal), jnp.maximum(rows.spread(room) - before, 0))
    return above | sets.unpack(kept, mass.shape[-1])


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
