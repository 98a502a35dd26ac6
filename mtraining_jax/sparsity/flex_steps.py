"""The steps of FlexPrefill's choice over all ranks, with the same bits on any number of them.

Sums are sums of integers, and what floats decide is computed elementwise or by products whose
shapes depend on the whole sequence alone (see `estimate.py`).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.sparsity import estimate, exchange, pooling, row_scores, select
from mtraining_jax.sparsity.pattern import Shards
from mtraining_jax.sparsity.row_rule import first_of
from pallas_kernels.index import bits as sets

# Queries of one pass of the estimate: what its kernels compute.
_QUERIES = 64
_GAMMA_BITS = 15
_LIMB = 16
_DIGIT_BITS = 4
_DISTANCE_BITS = 28  # terms of the divergence: a few, each below 1, add up within 2^31


class LastAttention(NamedTuple):
    """What the last queries see, over the whole sequence and replicated.

    Attributes:
        tokens: int32 [2, B, Hq], largest columns and diagonals (by token) within gamma, and one.
        masses: int32 [2, B, Hq, NB], 2^30 in all, of key blocks and of distances by block.
    """

    tokens: Array
    masses: Array


def last_attention(
    q: Array, k: Array, shards: Shards, block_size: int, gamma: float
) -> LastAttention:
    """Masses of columns and diagonals by the last `block_size` queries.

    Args:
        q: [B, n, Hq, D], local queries.
        k: [B, n, Hk, D], local keys.
        shards: where they lie.
        block_size: g.
        gamma: share of the mass up to which tokens are counted.
    """
    where = dict(block_ids=shards.block_ids, num_blocks=shards.num_blocks)
    seq_len = shards.num_blocks * block_size
    end = jnp.int32(seq_len) if shards.valid_len is None else shards.valid_len
    # In passes as large as the kernels take: the mean of equal shares is the mean of all.
    passes = block_size // _QUERIES if block_size % _QUERIES == 0 else 1
    count = block_size // passes
    ends = [end - i * count for i in range(passes)]
    parts = []
    for last in ends:
        positions = estimate.last_positions(count, last)
        q_last = exchange.gather_rows(q, positions, **where, axis_names=shards.axis_names)
        parts += estimate.softmax_scores(
            q_last.transpose(0, 2, 1, 3), k, scale=shards.scale_for(q.shape[3]),
            backend=shards.backend, axis_names=shards.axis_names, valid_len=last, **where,
        )
    whole, _ = exchange.to_heads(parts, **where, axis_names=shards.axis_names)
    sums = []
    for number, last in enumerate(ends):
        columns, own, tails = whole[3 * number : 3 * number + 3]
        # Token V-1-s holds diagonal s; behind the flip and the roll, diagonal s is entry s.
        slash = jnp.flip(estimate.join_diagonals(own, tails), axis=(-2, -1))
        flat = jnp.roll(slash.reshape(slash.shape[0], -1), last - seq_len, 1)
        sums.append(jnp.stack([columns, flat.reshape(slash.shape)]) // passes)
    masses = sum(sums[1:], sums[0])  # [2, R, NB, g]
    rule = select.Rule(
        minimum=0,
        maximum=jnp.minimum(end, seq_len),
        mass_target=min(round(gamma * estimate.MASS_ONE) + 1, (1 << 31) - 1),
        mass_mask=(1 << 31) - 1,
        keep_crossing=False,
    )
    _, within = select.kept_entries(masses.astype(jnp.uint32), rule)
    of_blocks = masses.sum(-1, dtype=jnp.int32)
    packed = jnp.concatenate([within[..., None] + 1, of_blocks], axis=-1)
    packed = jnp.moveaxis(packed, 0, 1).reshape(packed.shape[1], -1)
    found = exchange.from_heads(packed, q.shape[0], q.shape[2], shards.axis_names)
    found = jnp.moveaxis(found.reshape(*found.shape[:2], 2, -1), 2, 0)
    return LastAttention(found[..., 0], found[..., 1:])


def largest(masses: Array, counts: Array) -> Array:
    """Marks the blocks of largest mass, the first block before all others.

    Args:
        masses: int32 [..., NB], below 2^31.
        counts: int32 [...], how many; at least 1.

    Returns:
        bool [..., NB]. Of equal masses the smaller number comes first.
    """
    keys = masses.astype(jnp.uint32).at[..., 0].set(1 << 31)
    kept, _ = select.kept_entries(keys[..., None], select.Rule(minimum=0, maximum=counts))
    return kept[..., 0]


def distances(q: Array, k: Array, shards: Shards, block_masses: Array) -> Array:
    """Jensen-Shannon distances between pooled attention of the last queries and their own.

    Args:
        q: [B, n, Hq, D], local queries.
        k: [B, n, Hk, D], local keys.
        shards: where they lie.
        block_masses: int32 [B, Hq, NB], 2^30 in all, the masses of key blocks by the last queries.

    Returns:
        fp32 [B, Hq], from 0 to sqrt(ln 2), replicated.
    """
    size = q.shape[1] // shards.block_ids.shape[0]
    end = shards.num_blocks * size if shards.valid_len is None else shards.valid_len
    positions = estimate.last_positions(size, end)
    last = exchange.gather_rows(
        q, positions, shards.block_ids, shards.num_blocks, shards.axis_names
    )
    seen = jnp.where((positions >= 0)[:, None, None], last.astype(jnp.float32), 0.0)
    count = jnp.minimum(end, size)
    mean = estimate.ordered_sum(seen.transpose(0, 2, 1, 3)) / jnp.asarray(count, jnp.float32)
    keys = _key_means(k, shards)
    batch, kv_heads, num_blocks, dim = keys.shape
    logits = lax.dot_general(
        mean.reshape(batch, kv_heads, -1, dim), keys, (((3,), (3,)), ((0, 1), (0, 1))),
        precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
    ).reshape(batch, -1, num_blocks)
    exists = jnp.arange(num_blocks, dtype=jnp.int32) * size < end
    logits = jnp.where(exists, logits, -jnp.inf)
    terms = estimate.relative_exp(
        logits, logits.max(-1, keepdims=True), shards.scale_for(dim)
    )
    pooled = _shares(terms)
    return _distance(pooled, _shares(block_masses.astype(jnp.float32) * 2.0**-30))


def pooled_lists(q: Array, k: Array, shards: Shards, gamma: float) -> Array:
    """The largest entries of pooled attention, of all rows together, while within gamma of all.

    Args:
        q: [B, n, Hq, D], local queries.
        k: [B, n, Hk, D], local keys.
        shards: where they lie.
        gamma: share of the number of rows, which is the sum of all entries.

    Returns:
        bool [B, Hq, n/g, NB], of the local rows.
    """
    size = q.shape[1] // shards.block_ids.shape[0]
    places = shards.block_ids
    num_rows = shards.num_blocks
    if shards.valid_len is not None:
        places = jnp.where(places * size < shards.valid_len, places, -1)
        num_rows = -(-shards.valid_len // size)
    queries = pooling.block_means(q, shards.block_ids, shards.ends(shards.block_ids, size))
    keys = _key_means(k, shards)
    shares = row_scores.block_masses(
        queries[:, :, :, None], keys[:, :, :, None], places[:, None],
        scale=shards.scale_for(q.shape[3]), like=q, backend="xla",  # a product for 128^2 pairs
    )
    mass = jnp.round(shares * estimate.MASS_ONE).astype(jnp.uint32)
    # gamma * num_rows * 2^30 in limbs of 16 bits: below 2^46.
    target = round(gamma * (1 << _GAMMA_BITS)) * jnp.asarray(num_rows, jnp.uint32)
    high, low = target >> 1, (target & 1) << (_LIMB - 1)

    def sums(candidates: Array) -> tuple[Array, Array, Array]:
        """For candidates uint32 [B, Hq]: limbs of the sum of all that reach it, and row counts."""
        reached = mass >= candidates[..., None, None]
        of_rows = jnp.where(reached, mass, 0).sum(-1, dtype=jnp.uint32)
        limbs = of_rows >> _LIMB, of_rows & ((1 << _LIMB) - 1)
        upper, lower = exchange.exact_sum(
            tuple(x.sum(-1, dtype=jnp.uint32) for x in limbs), shards.axis_names
        )
        return upper + (lower >> _LIMB), lower & ((1 << _LIMB) - 1), reached

    def within(upper: Array, lower: Array) -> Array:
        return (upper < high) | ((upper == high) & (lower <= low))

    # The least mass above which all entries together are within the target, bit by bit: all
    # entries that reach `too_low` are too much, or it is 0.
    def narrow(step: Array, too_low: Array) -> Array:
        candidate = too_low + (jnp.uint32(1) << (30 - step).astype(jnp.uint32))
        upper, lower, _ = sums(candidate)
        return jnp.where(within(upper, lower), too_low, candidate)

    cut = lax.fori_loop(0, 31, narrow, jnp.zeros(mass.shape[:2], jnp.uint32))
    upper, lower, above = sums(cut + 1)
    equal = (mass == cut[..., None, None]) & (cut > 0)[..., None, None]
    # How many entries of the cut itself stay within: those left in limbs, divided exactly.
    missing = _difference(high, low, upper, lower)
    room = _quotient(*missing, jnp.maximum(cut, 1))
    of_rows = equal.sum(-1, dtype=jnp.int32)  # [B, Hq, n]
    everywhere = jnp.zeros((*of_rows.shape[:2], shards.num_blocks), jnp.int32)
    everywhere = exchange.exact_sum(
        everywhere.at[..., shards.block_ids].set(of_rows), shards.axis_names
    )
    before = (jnp.cumsum(everywhere, -1, dtype=jnp.int32) - everywhere)[..., shards.block_ids]
    kept = first_of(sets.pack(equal), jnp.maximum(room[..., None] - before, 0))
    return above | sets.unpack(kept, shards.num_blocks)


def _key_means(k: Array, shards: Shards) -> Array:
    """Means over the tokens of all key blocks: fp32 [B, Hk, NB, D], replicated."""
    ends = shards.ends(shards.block_ids, k.shape[1] // shards.block_ids.shape[0])
    means = pooling.block_means(k, shards.block_ids, ends).transpose(0, 2, 1, 3)
    where = shards.block_ids, shards.num_blocks, shards.axis_names
    return exchange.all_blocks(means, *where).transpose(0, 2, 1, 3)


def _shares(x: Array) -> Array:
    """Numbers [..., n], each at most 1, over their sum, which is one of integers."""
    one = float(1 << (30 - (x.shape[-1] - 1).bit_length()))
    total = jnp.round(x * one).astype(jnp.int32).sum(-1, keepdims=True, dtype=jnp.int32)
    return x / jnp.maximum(total.astype(jnp.float32) * (1 / one), 1e-30)


def _distance(p: Array, q: Array) -> Array:
    """The root of the Jensen-Shannon divergence of shares [..., n], natural logarithm."""

    def terms(x: Array, y: Array) -> Array:
        ratio = jnp.where(x > 0, 2 * x / jnp.maximum(x + y, 1e-30), 1.0)
        scaled = x * jnp.log(ratio) * float(1 << _DISTANCE_BITS)
        return jnp.round(scaled).astype(jnp.int32).sum(-1, dtype=jnp.int32)

    both = terms(p, q) + terms(q, p)
    return jnp.sqrt(jnp.maximum(both, 0).astype(jnp.float32) * 2.0 ** -(_DISTANCE_BITS + 1))


def _difference(high: Array, low: Array, upper: Array, lower: Array) -> tuple[Array, Array]:
    """(high, low) - (upper, lower) in limbs of 16 bits, at least 0."""
    borrow = (low < lower).astype(jnp.uint32)
    return high - upper - borrow, low + (borrow << _LIMB) - lower


def _quotient(high: Array, low: Array, by: Array) -> Array:
    """(high * 2^16 + low) // by, at most 2^30, as int32; `by` uint32 in 1 .. 2^31 - 1.

    By long division, a bit at a time: 64-bit integers are not at hand.
    """
    most = jnp.uint32(1 << 30)

    def digit(step: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        rest, found = state
        place = (47 - step).astype(jnp.uint32)
        bit = jnp.where(place >= _LIMB, high >> (jnp.maximum(place, _LIMB) - _LIMB), low >> place)
        rest = (rest << 1) | (bit & 1)
        fits = rest >= by
        found = jnp.minimum((found << 1) | fits, most)
        return jnp.where(fits, rest - by, rest), found

    zero = jnp.zeros(jnp.broadcast_shapes(high.shape, by.shape), jnp.uint32)
    return lax.fori_loop(0, 48, digit, (zero, zero))[1].astype(jnp.int32)
