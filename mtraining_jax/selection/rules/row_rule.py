"""Rule for the key blocks of each query block: the heaviest, until a mass fraction is reached.

The rule applies to each row of blocks independently, so ranks need no communication for their rows.
It computes in integers throughout, so the selection is bit-identical for any number of ranks if the
scores are.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mtraining_jax.documents import Documents
from mtraining_jax.utils.random_bits import hash_uint32
from pallas_kernels.fp8_scores import TAU_BITS, KeepRule
from pallas_kernels.index import bits as sets

# The mass of a row is about 2^30 in total, and below 2^31 however it is rounded.
_MASS_BITS = 30
_DIGIT_BITS = 3
_ROUNDS = 11  # of `_DIGIT_BITS`: masses are below 2^31


@dataclasses.dataclass(frozen=True)
class RowRule:
    """Keeps key blocks, heaviest first, while the sum before them is below a fraction of the row's.

    The block that reaches the fraction is kept. Forced blocks are always kept and count first. Ties
    go to the smaller block number. Blocks below the minimum block mass are skipped even if `tau` is
    not reached. With `tau` 1 only the minimum matters, and rows and heads with concentrated mass
    keep few blocks.

    The fields are those of `RowPattern`, in blocks. `tau` is rounded to a multiple of 2^-15, or per
    sequence, int32 [B] in units of 2^-15. `dense_rows`, bool [B or 1, n], are rows with all blocks
    forced: of short documents, and of a dense suffix.
    """

    tau: float | Array
    sink_blocks: int = 1
    local_blocks: int = 1  # including a row's own; at least 1
    min_block_mass: float = 0.0
    dense_prefix_blocks: int = 0
    random_block_prob: float = 0.0
    dense_rows: Array | None = None

    def forced_ends(self, rows: Array, documents: Documents) -> Array:
        """Returns the end of the forced blocks at the start of a row's document: int32 [B or 1, n].

        Where all blocks of a row are forced, that is the number of the row.
        """
        first, dense = documents.of(rows).first, self.dense_rows
        if self.dense_prefix_blocks:
            prefix = rows - first < self.dense_prefix_blocks
            dense = prefix if dense is None else dense | prefix
        ends = first + self.sink_blocks
        return ends if dense is None else jnp.where(dense, rows, ends)

    def least_mass(self) -> int:
        return max(round(self.min_block_mass * (1 << _MASS_BITS)), 1)

    def kernel_rule(self, rows: Array, documents: Documents, num_rows: int) -> KeepRule:
        """Returns the rule, without random blocks, for the kernels that keep blocks."""
        tau = self.tau
        if not isinstance(tau, Array):
            tau = jnp.full((1,), round(tau * (1 << TAU_BITS)), jnp.int32)
        tau = jnp.broadcast_to(tau[:, None], (len(tau), len(rows)))
        first, ends = documents.of(rows).first, self.forced_ends(rows, documents)
        numbers = self.local_blocks, self.least_mass(), num_rows
        return KeepRule(rows[None], first, ends, tau, *numbers)

    def drawn(self, rows: Array, documents: Documents, heads: int, num_blocks: int) -> Array:
        """Returns the bits of the randomly drawn blocks, uint32 [B or 1, Hq, n, w]."""
        numbers = jnp.arange(num_blocks, dtype=jnp.int32)
        first = documents.of(rows).first[:, None, :, None]
        causal = (rows[:, None] >= numbers) & (numbers >= first)
        positions = rows[:, None] - first, numbers - first
        return sets.pack(causal & _drawn(*positions, heads, self.random_block_prob))


def kept_blocks(
    scores: Array,
    rows: Array,
    rule: RowRule,
    documents: Documents,
    column_mass: Array | None = None,
) -> Array:
    """Selects the key blocks of each row of blocks: uint32 bits as in `BlockMaskIndex`.

    Rows, int32 [n] block numbers, keep blocks of their own document only, all of them up to their
    own where the rule has dense rows; rows without a document keep none.

    Args:
        scores: fp32 [B, Hq, n, NB], at least 0; blocks after a row's own and NaNs are ignored.
        column_mass: fp32 [B, Hq, n], at least 0: mass of each row that is kept in addition to its
            blocks, in the unit of the scores. None for nothing.
    """
    num_blocks = scores.shape[-1]
    numbers = jnp.arange(num_blocks, dtype=jnp.int32)
    distance = rows[:, None] - numbers
    row_documents = documents.of(rows)
    first, length = (x[:, None, :, None] for x in (row_documents.first, row_documents.length))
    causal = (distance >= 0) & (numbers >= first)
    sinks = numbers < rule.forced_ends(rows, documents)[:, None, :, None]
    forced = causal & (sinks | (distance < rule.local_blocks))
    scores, kept = jnp.where(causal & (scores > 0), scores, 0.0), 0
    if column_mass is None:
        mass = whole_masses(scores, length)
        total = mass.sum(-1, dtype=jnp.int32)
    else:
        mass = whole_masses(jnp.concatenate([scores, column_mass[..., None]], axis=-1), length + 1)
        total = mass.sum(-1, dtype=jnp.int32)
        mass, kept = mass[..., :-1], mass[..., -1]
    tau = rule.tau
    if isinstance(tau, Array):
        tau = tau[:, None, None]
    else:
        tau = round(tau * (1 << TAU_BITS))
    target = _share(total, tau)
    before = jnp.where(forced, mass, 0).sum(-1, dtype=jnp.int32) + kept
    free = jnp.where(forced, 0, mass).astype(jnp.uint32)
    threshold = _find_threshold(free, target - before)
    heavier = free > threshold[..., None]
    above = before + jnp.where(heavier, free, 0).sum(-1, dtype=jnp.uint32).astype(jnp.int32)
    # Entry k of equal ones is kept while above + k * threshold < target.
    each = jnp.clip(threshold, 1, jnp.iinfo(jnp.int32).max).astype(jnp.int32)
    equal_kept = -(-(target - above) // each)
    least = rule.least_mass()
    equal = first_of(sets.pack((free == threshold[..., None]) & (free >= least)), equal_kept)
    bits = sets.pack(forced | (heavier & (free >= least))) | equal
    if not rule.random_block_prob:
        return bits
    return bits | rule.drawn(rows, documents, scores.shape[1], num_blocks)


def _drawn(rows: Array, numbers: Array, heads: int, share: float) -> Array:
    """Whether the hash of its position draws each block: bool [..., Hq, n, NB].

    Independent of the scores: if a layer is rematerialized, scores that differ in their last bit
    draw the same blocks.
    """
    salts = hash_uint32(jnp.arange(1, heads + 1, dtype=jnp.uint32))[:, None, None]
    positions = (rows.astype(jnp.uint32) << 16) ^ numbers.astype(jnp.uint32)
    threshold = np.uint32(min(round(share * 2**32), 2**32 - 1))
    return hash_uint32(hash_uint32(positions) ^ salts) < threshold


def whole_masses(scores: Array, length: Array) -> Array:
    """Converts scores of rows, fp32 [..., n] of at least 0, to integers of total about 2^30.

    `length`, int32 that broadcasts to [..., 1], is how many of the n scores may be nonzero, up
    to 2^16. The result is bit-identical to that of these scores alone. All 0 if all scores are. The
    total may be up to twice as large for more than 2^15 scores.
    """
    # First coarsely, relative to the row's maximum, for a total that does not depend on the order
    # of additions; then relative to that total.
    length_bits = 32 - lax.clz(jnp.maximum(length - 1, 0))
    # Of 2^16 scores, all but one of just under half a unit, masses sum to less than 2^31.
    coarse_bits = jnp.maximum(_MASS_BITS - length_bits, _MASS_BITS // 2)
    coarse_one = (jnp.int32(1) << coarse_bits).astype(jnp.float32)
    peak = scores.max(-1, keepdims=True)
    shares = jnp.where(peak > 0, scores / jnp.where(peak > 0, peak, 1.0), 0.0)
    coarse = jnp.round(shares * coarse_one).astype(jnp.uint32)
    total = coarse.sum(-1, keepdims=True, dtype=jnp.uint32).astype(jnp.float32)
    to_mass = float(1 << _MASS_BITS) / jnp.maximum(total, 1.0)
    return jnp.round(shares * (to_mass * coarse_one)).astype(jnp.int32)


def _share(total: Array, tau: int | Array) -> Array:
    """Returns ceil(2^-15 tau * total) for int32 totals below 2^31, without overflow."""
    high, low = total >> TAU_BITS, total & ((1 << TAU_BITS) - 1)
    return high * tau + -(-(low * tau) >> TAU_BITS)


def _find_threshold(mass: Array, missing: Array) -> Array:
    """Returns the largest mass such that all entries reaching it sum to at least `missing`.

    Entries above it are kept, entries below it are not. Searched digit by digit: each round sums
    the entries that reach a few candidates. If nothing is missing, it is above every mass.
    """
    digits = jnp.arange(1, 1 << _DIGIT_BITS, dtype=jnp.uint32)

    def narrow(step, base):
        shift = jnp.uint32((_ROUNDS - 1 - step) * _DIGIT_BITS)
        largest = jnp.uint32(0xFFFFFFFF)  # no mass reaches it, nor larger candidates
        offsets = jnp.where(digits <= largest >> shift, digits << shift, largest)
        sums = _sums_from(mass, base[..., None] + offsets)
        reached = sums.astype(jnp.int32) >= missing[..., None]
        return base + (reached.sum(-1, dtype=jnp.uint32) << shift)

    return lax.fori_loop(0, _ROUNDS, narrow, jnp.zeros(mass.shape[:-1], jnp.uint32))


def _sums_from(mass: Array, candidates: Array) -> Array:
    """Sums the masses uint32 [..., n] that reach each candidate [..., c]: uint32 [..., c].

    One pass over the masses; with a candidate axis XLA would read them once per candidate.
    """
    zero = jnp.zeros((), jnp.uint32)
    parts = tuple(
        jnp.where(mass >= candidates[..., i, None], mass, 0) for i in range(candidates.shape[-1])
    )

    def add(x, y):
        return tuple(a + b for a, b in zip(x, y, strict=True))

    sums = lax.reduce(parts, (zero,) * len(parts), add, (mass.ndim - 1,))
    return jnp.stack(sums, axis=-1)


def first_of(words: Array, most: Array) -> Array:
    """Returns the subsets with the first `most` int32 [...] numbers of sets uint32 [..., w]."""
    number = sets.count_before(words)[..., None] + _rank_in_word(words)
    return words & sets.pack((number < most[..., None, None]).reshape(*words.shape[:-1], -1))


def _rank_in_word(words: Array) -> Array:
    """Returns how many set bits precede each bit position: int32 [..., w, 32]."""
    below = (jnp.uint32(1) << jnp.arange(sets.WORD, dtype=jnp.uint32)) - 1
    return lax.population_count(words[..., None] & below).astype(jnp.int32)
