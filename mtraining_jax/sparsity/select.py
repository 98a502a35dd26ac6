"""Choosing the largest of many keys that are spread over ranks, in exact integer arithmetic.

The order is total: key descending, then id ascending. Instead of sorting, the key of the last
entry kept is searched digit by digit: each round counts, on every rank, the keys at and above a
few candidate thresholds and adds the counts up over ranks. No rank sees more than its own keys, no
rank does more than the others, and what travels are a few hundred integers per head.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.sparsity import exchange
from mtraining_jax.sparsity.exchange import AxisNames

KEY_BITS = 32
_DIGIT_BITS = 4


@dataclasses.dataclass(frozen=True)
class Rule:
    """How many entries to keep, in the order of the keys.

    Without a mass target: `maximum` entries. With one: entries until the sum of their masses
    reaches the target, but at least `minimum` and at most `maximum`. Every field broadcasts
    against the leading dimensions of the keys.

    Attributes:
        minimum: int32, least number of entries.
        maximum: int32, most entries; exceeds no number of keys.
        mass_target: int32 or None.
        mass_mask: uint32 bits of a key that are its mass. Keys with a bit above the mask rank
            above all others, whatever their mass.
        keep_crossing: whether the entry that makes the sum reach the target is kept.
    """

    minimum: Array | int
    maximum: Array | int
    mass_target: int | None = None
    mass_mask: int = 0
    keep_crossing: bool = True


def kept_entries(
    keys: Array, ids: Array, num_blocks: int, rule: Rule, axis_names: AxisNames
) -> tuple[Array, Array]:
    """Marks the entries that a rule keeps.

    Args:
        keys: uint32 [..., n/g, g], local keys. The id of an entry is `ids * g` plus its place in
            the block.
        ids: int32 [..., n/g], broadcast against `keys`: the rank of each local block in the order
            that breaks ties.
        num_blocks: NB, blocks over all ranks.
        rule: what to keep.
        axis_names: mesh axes the blocks are spread over.

    Returns:
        (kept, kept_before): bool [..., n/g, g], and int32 [..., NB + 1], the number of entries
        kept in all blocks with a smaller id; its last entry is the number kept at all.
    """
    threshold, ties_kept = _find_threshold(keys, rule, axis_names)
    above = keys > threshold[..., None, None]
    tied = keys == threshold[..., None, None]

    @functools.partial(jnp.vectorize, signature="(n),(n)->(b)")
    def table(counts, ids):
        return exchange.block_table(counts, ids, num_blocks)

    local_counts = (x.sum(-1, dtype=jnp.int32) for x in (above, tied))
    above_counts, tied_counts = exchange.exact_sum(
        tuple(table(counts, ids) for counts in local_counts), axis_names
    )
    tied_before = _exclusive_cumsum(tied_counts)
    ties_left = ties_kept[..., None] - tied_before[..., :-1]
    kept_counts = above_counts + jnp.clip(ties_left, 0, tied_counts)
    first = jnp.take_along_axis(ties_left, jnp.broadcast_to(ids, keys.shape[:-1]), axis=-1)
    kept = above | (tied & (_exclusive_cumsum(tied)[..., :-1] < first[..., None]))
    return kept, _exclusive_cumsum(kept_counts)


def ascending_ids(
    kept: Array, kept_before: Array, ids: Array, capacity: int, fill: int, axis_names: AxisNames
) -> Array:
    """Ids of the kept entries of all ranks in ascending order.

    Args:
        kept: bool [..., n/g, g] from `kept_entries`.
        kept_before: int32 [..., NB + 1] from `kept_entries`.
        ids: int32 [n/g].
        capacity: length of the list; at least the number of entries kept.
        fill: value beyond the end; above every id.
        axis_names: mesh axes the blocks are spread over.

    Returns:
        int32 [..., capacity], the same on every rank.
    """
    size = kept.shape[-1]
    places = kept_before[..., ids][..., None] + _exclusive_cumsum(kept)[..., :-1]
    places = jnp.where(kept, places, capacity)
    # Differences from `fill`, so that the zeros of places nobody fills mean `fill`.
    values = fill - (ids[:, None] * size + jnp.arange(size, dtype=jnp.int32))

    @functools.partial(jnp.vectorize, signature="(n,g)->(c)")
    def scatter(where):
        zeros = jnp.zeros(capacity, jnp.int32)
        return zeros.at[where.reshape(-1)].set(values.reshape(-1), mode="drop")

    return fill - exchange.exact_sum(scatter(places), axis_names)


def float_keys(x: Array) -> Array:
    """Maps fp32 to uint32 in the same order; -0 equals 0, NaN ranks lowest."""
    x = jnp.where(jnp.isnan(x), -jnp.inf, jnp.where(x == 0, 0.0, x)).astype(jnp.float32)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign, ~bits, bits | sign)


def _find_threshold(keys: Array, rule: Rule, axis_names: AxisNames) -> tuple[Array, Array]:
    """Key of the last entry kept, and how many entries with that key are kept.

    Entries above the threshold are all kept. The second result may exceed the number of entries
    there are.

    Returns:
        (uint32 [...], int32 [...]), over the leading dimensions of `keys` [..., n/g, g].
    """
    lead = keys.shape[:-2]
    rounds = KEY_BITS // _DIGIT_BITS
    digits = jnp.arange(1, 1 << _DIGIT_BITS, dtype=jnp.uint32)
    minimum = jnp.broadcast_to(jnp.asarray(rule.minimum, jnp.int32), lead)
    maximum = jnp.broadcast_to(jnp.asarray(rule.maximum, jnp.int32), lead)
    mask = jnp.uint32(rule.mass_mask)

    def enough(count, mass):
        if rule.mass_target is None:
            return count >= maximum[..., None]
        reached = (mass >= rule.mass_target) & (count >= minimum[..., None])
        return reached | (count >= maximum[..., None])

    def narrow(step, state):
        # The threshold lies in [base, base + 16^(rounds - step)); `count` and `mass` are those of
        # the keys above that range.
        base, count, mass = state
        shift = jnp.uint32((rounds - 1 - step) * _DIGIT_BITS)
        candidates = base[..., None] + (digits << shift)
        counts, masses = exchange.exact_sum(
            _sums_from(keys, (keys & mask).astype(jnp.int32), candidates), axis_names
        )
        digit = enough(counts, masses).sum(-1, dtype=jnp.int32)
        counts = jnp.concatenate([counts, count[..., None]], axis=-1)
        masses = jnp.concatenate([masses, mass[..., None]], axis=-1)
        base = base + (digit.astype(jnp.uint32) << shift)
        return base, _pick(counts, digit), _pick(masses, digit)

    zeros = jnp.zeros(lead, jnp.int32)
    start = (jnp.zeros(lead, jnp.uint32), zeros, zeros)
    threshold, count, mass = lax.fori_loop(0, rounds, narrow, start)
    room = maximum - count
    if rule.mass_target is None:
        return threshold, room
    missing = rule.mass_target - mass
    each = (threshold & mask).astype(jnp.int32)
    # Of equal entries, the first that brings the sum to the target is number ceil(missing/each).
    crossing = -(-missing // jnp.maximum(each, 1))
    by_mass = jnp.where(each == 0, room, crossing if rule.keep_crossing else crossing - 1)
    by_mass = jnp.where(missing > 0, by_mass, 0)
    return threshold, jnp.clip(jnp.maximum(by_mass, minimum - count), 0, room)


def _sums_from(keys: Array, masses: Array, candidates: Array) -> tuple[Array, Array]:
    """How many keys reach each candidate, and the sum of their masses.

    One pass over the keys, all sums at once. With an axis of candidates instead, XLA reads the keys
    once for each, or writes all comparisons to memory where the keys exceed the L2 cache: 250 MB a
    round for 524288 keys of 16 heads.

    Args:
        keys: uint32 [..., n/g, g].
        masses: int32 like `keys`.
        candidates: uint32 [..., c].

    Returns:
        (int32 [..., c], int32 [..., c]).
    """
    zero = jnp.zeros((), jnp.int32)
    parts = []
    for i in range(candidates.shape[-1]):
        reached = keys >= candidates[..., i, None, None]
        parts += [reached.astype(jnp.int32), jnp.where(reached, masses, 0)]

    def add(x, y):
        return tuple(a + b for a, b in zip(x, y, strict=True))

    axes = keys.ndim - 2, keys.ndim - 1
    sums = lax.reduce(tuple(parts), (zero,) * len(parts), add, axes)
    return jnp.stack(sums[::2], axis=-1), jnp.stack(sums[1::2], axis=-1)


def _pick(x: Array, place: Array) -> Array:
    """The entry of each row of x [..., n] at its place [...]."""
    return jnp.take_along_axis(x, place[..., None], axis=-1)[..., 0]


def _exclusive_cumsum(x: Array) -> Array:
    """Sums of all entries before each place of the last axis; one longer than x."""
    sums = jnp.cumsum(x, axis=-1, dtype=jnp.int32)
    return jnp.pad(sums, [(0, 0)] * (x.ndim - 1) + [(1, 0)])
