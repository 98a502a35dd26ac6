"""Which key blocks each block of queries keeps: the heaviest, until their share is reached.

The rule is applied to each row of blocks by itself, so a rank needs no other for its own rows. It
computes in integers from the first step on, so the choice has the same bits on any number of ranks
if the scores have.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mtraining_jax.sparsity.document_blocks import DocumentBlocks
from mtraining_jax.sparsity.hashing import mixed
from pallas_kernels.index import bits as sets

# The mass of a row is close to 2^30 in all, and below 2^31 however it is rounded.
_MASS_BITS = 30
TAU_BITS = 15
_DIGIT_BITS = 4
_ROUNDS = 8  # of `_DIGIT_BITS`: masses are below 2^31


@dataclasses.dataclass(frozen=True)
class RowRule:
    """Key blocks are kept, heaviest first, while the sum before them is below a share of the row's.

    The entry that reaches the share is kept. Forced blocks are kept whatever they hold and count
    first. Of equal blocks the one with the smaller number is kept first. Blocks that hold less than
    a least share of the row are left out even if `tau` is not reached without them: with `tau` 1
    that alone decides, and rows and heads with much mass in few blocks get few.

    Attributes:
        tau: share of the row's mass, in (0, 1]; rounded to a multiple of 2^-15. With 1 every block
            of any mass is kept. Or for each sequence, int32 [B] in units of 2^-15.
        sink_blocks: first blocks of the row's document, which are forced.
        local_blocks: nearest blocks, a row's own among them, which are forced; at least 1.
        least_share: share of the row's mass that a block needs to be kept, unless it is forced.
        dense_start: rows at the start of the document, of which all blocks are forced.
        random_share: share of the blocks left out by all this that is kept all the same, in [0, 1).
            Which ones is a hash of the head and of the places of row and block in their document.
        dense_rows: bool [B or 1, n], rows of which all blocks are forced; None for no others.
    """

    tau: float | Array
    sink_blocks: int = 1
    local_blocks: int = 1
    least_share: float = 0.0
    dense_start: int = 0
    random_share: float = 0.0
    dense_rows: Array | None = None


def kept_blocks(
    scores: Array, rows: Array, rule: RowRule, documents: DocumentBlocks | None = None,
    beside: Array | None = None,
) -> Array:
    """The key blocks that each row of blocks keeps.

    Args:
        scores: fp32 [B, Hq, n, NB], at least 0; entries ahead of a row's own block do not count,
            nor do NaNs.
        rows: int32 [n], the global block number of each row.
        rule: what to keep.
        documents: of each sequence, or None if each is one. A row keeps blocks of its own document
            alone, all of them up to its own if that is dense; a row of no document keeps none.
        beside: fp32 [B, Hq, n], at least 0: mass of each row, in the unit of the scores, that is
            kept beside its blocks and is none of theirs. None for nothing.

    Returns:
        uint32 [B, Hq, n, ceil(NB/32)], bits as in `BlockMaskIndex`.
    """
    num_blocks = scores.shape[-1]
    numbers = jnp.arange(num_blocks, dtype=jnp.int32)
    distance = rows[:, None] - numbers
    causal, sinks, length = distance >= 0, numbers < rule.sink_blocks, None
    local, first = distance < rule.local_blocks, 0
    if documents is not None:
        first, length, _, dense = (x[:, None, :, None] for x in documents.of(rows))
        causal &= numbers >= first
        sinks = (numbers - first < rule.sink_blocks) | dense
    if rule.dense_start:
        sinks |= rows[:, None] - first < rule.dense_start
    if rule.dense_rows is not None:
        sinks |= rule.dense_rows[:, None, :, None]
    forced = causal & (sinks | local)
    scores, kept = jnp.where(causal & (scores > 0), scores, 0.0), 0
    if beside is None:
        mass = whole_masses(scores, length)
        total = mass.sum(-1, dtype=jnp.int32)
    else:
        many = None if length is None else length + 1
        mass = whole_masses(jnp.concatenate([scores, beside[..., None]], axis=-1), many)
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
    # Entry k of the equal ones is kept while above + k * threshold < target.
    each = jnp.clip(threshold, 1, jnp.iinfo(jnp.int32).max).astype(jnp.int32)
    equal_kept = -(-(target - above) // each)
    least = max(round(rule.least_share * (1 << _MASS_BITS)), 1)
    equal = first_of(sets.pack((free == threshold[..., None]) & (free >= least)), equal_kept)
    chosen = forced | (heavier & (free >= least))
    if rule.random_share:
        places = rows[:, None] - first, numbers - first
        chosen |= causal & _drawn(*places, scores.shape[1], rule.random_share)
    return sets.pack(chosen) | equal


def _drawn(rows: Array, numbers: Array, heads: int, share: float) -> Array:
    """Whether a hash of its place draws each block: bool [..., Hq, n, NB].

    It knows nothing of the scores: where a layer is computed again for its gradients, scores that
    differ in their last bit draw the same blocks.

    Args:
        rows: int32 [..., n, 1], of the document.
        numbers: int32 [..., NB], likewise.
        heads: Hq.
        share: how many of the blocks.
    """
    salts = mixed(jnp.arange(1, heads + 1, dtype=jnp.uint32))[:, None, None]
    places = (rows.astype(jnp.uint32) << 16) ^ numbers.astype(jnp.uint32)
    return mixed(mixed(places) ^ salts) < np.uint32(min(round(share * 2**32), 2**32 - 1))


def whole_masses(scores: Array, length: Array | None = None) -> Array:
    """Scores of rows as integers that add up to about 2^30.

    Args:
        scores: fp32 [..., n], at least 0.
        length: int32, broadcasts to [..., 1]: how many of the n scores may be above 0; None for
            all. The masses have the bits that these scores have alone.

    Returns:
        int32 [..., n]; all 0 where all scores are.
    """
    # Coarsely first, by the largest of each row, for a total whose order of additions means
    # nothing; then by that total.
    if length is None:
        coarse_one = float(1 << (_MASS_BITS - (scores.shape[-1] - 1).bit_length()))
    else:
        length_bits = 32 - lax.clz(jnp.maximum(length - 1, 0))
        coarse_one = (jnp.int32(1) << (_MASS_BITS - length_bits)).astype(jnp.float32)
    peak = scores.max(-1, keepdims=True)
    shares = jnp.where(peak > 0, scores / jnp.where(peak > 0, peak, 1.0), 0.0)
    coarse = jnp.round(shares * coarse_one).astype(jnp.int32)
    total = coarse.sum(-1, keepdims=True, dtype=jnp.int32).astype(jnp.float32)
    to_mass = float(1 << _MASS_BITS) / jnp.maximum(total, 1.0)
    return jnp.round(shares * (to_mass * coarse_one)).astype(jnp.int32)


def _share(total: Array, tau: int | Array) -> Array:
    """ceil(2^-15 tau * total) of totals int32 below 2^31, without overflow."""
    high, low = total >> TAU_BITS, total & ((1 << TAU_BITS) - 1)
    return high * tau + -(-(low * tau) >> TAU_BITS)


def _find_threshold(mass: Array, missing: Array) -> Array:
    """The largest mass of which all entries that reach it add up to what is missing.

    Entries above it are all kept, those below it are not. It is found digit by digit: each round
    adds up what reaches a few candidates.

    Args:
        mass: uint32 [..., n]; the sum of a row is below 2^31.
        missing: int32 [...], no more than the sum of the row.

    Returns:
        uint32 [...]; above every mass if nothing is missing.
    """
    digits = jnp.arange(1, 1 << _DIGIT_BITS, dtype=jnp.uint32)

    def narrow(step, base):
        shift = jnp.uint32((_ROUNDS - 1 - step) * _DIGIT_BITS)
        sums = _sums_from(mass, base[..., None] + (digits << shift))
        reached = sums.astype(jnp.int32) >= missing[..., None]
        return base + (reached.sum(-1, dtype=jnp.uint32) << shift)

    return lax.fori_loop(0, _ROUNDS, narrow, jnp.zeros(mass.shape[:-1], jnp.uint32))


def _sums_from(mass: Array, candidates: Array) -> Array:
    """Sums uint32 [..., c] of the masses uint32 [..., n] that reach each candidate [..., c].

    One pass over the masses: with an axis of candidates XLA would read them once for each.
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
    """The first `most` int32 [...] numbers of sets uint32 [..., w], as such sets."""
    number = sets.count_before(words)[..., None] + _rank_in_word(words)
    return words & sets.pack((number < most[..., None, None]).reshape(*words.shape[:-1], -1))


def _rank_in_word(words: Array) -> Array:
    """For each place of each word, how many set bits lie below it: int32 [..., w, 32]."""
    below = (jnp.uint32(1) << jnp.arange(sets.WORD, dtype=jnp.uint32)) - 1
    return lax.population_count(words[..., None] & below).astype(jnp.int32)
