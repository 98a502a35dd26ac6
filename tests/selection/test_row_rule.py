"""The rule of row patterns, by its definition for one row at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.documents import Documents
from mtraining_jax.selection.rules.row_rule import RowRule, kept_blocks, whole_masses
from mtraining_jax.utils.limits import MAX_BLOCKS
from pallas_kernels.index import bits as sets

# Full words, and one cut by the end of the sequence.
NUM_BLOCKS = 40
ROWS = np.array([0, 1, 5, 31, 32, 38, 39])


def pick(mass, forced, target):
    """The definition: forced first, then mass descending, then number ascending."""
    keep, before = forced.copy(), 0
    for j in sorted(range(len(mass)), key=lambda j: (not forced[j], -mass[j], j)):
        keep[j] |= before < target
        before += mass[j]
    return keep


@jax.jit
def masses_of(scores):
    return whole_masses(scores, jnp.int32(scores.shape[-1]))


keep = jax.jit(
    functools.partial(kept_blocks, documents=Documents.whole(NUM_BLOCKS)), static_argnames="rule"
)


def scores_of(seed):
    """Heads of noise, equal blocks, one huge block, and zeros; NaN after the diagonal."""
    rng = np.random.default_rng(seed)
    scores = rng.random((2, 4, ROWS.size, NUM_BLOCKS)).astype(np.float32) ** 6
    scores[:, 1] = rng.integers(0, 3, scores[:, 1].shape)
    scores[0, 2, :, 3] = 1e6
    scores[0, 3] = 0
    return np.where(np.arange(NUM_BLOCKS) <= ROWS[:, None], scores, np.nan)


@pytest.mark.parametrize(
    ("tau", "sinks", "local", "least", "start"),
    [
        (0.5, 1, 1, 0.0, 0), (0.9, 2, 3, 0.0, 0), (1.0, 0, 1, 0.0, 0), (0.9, 1, 2, 0.03, 0),
        (0.5, 1, 1, 0.0, 32),
    ],
)  # fmt: skip
def test_blocks_are_kept_by_the_definition(tau, sinks, local, least, start):
    scores = scores_of(0)
    rule = RowRule(tau, sinks, local, least, start)
    bits = keep(scores, jnp.asarray(ROWS, jnp.int32), rule)
    numbers = np.arange(NUM_BLOCKS)
    found = np.asarray(bits)[..., numbers // 32] >> (numbers % 32) & 1 > 0
    assert not (np.asarray(bits)[..., -1] >> (NUM_BLOCKS % 32)).any()
    masses = np.asarray(masses_of(np.nan_to_num(scores))).astype(int)
    for b, h, i in np.ndindex(scores.shape[:3]):
        row = ROWS[i]
        mass = masses[b, h, i, : row + 1].tolist()
        forced = (numbers < sinks) | (row - numbers < local) | (row < start)
        # In integers, as the rule's multiple of 2^-15.
        target = -(-sum(mass) * round(tau * 2**15) // 2**15)
        wanted = pick(mass, forced[: row + 1], target)
        wanted &= forced[: row + 1] | (np.array(mass) >= least * 2**30)
        np.testing.assert_array_equal(found[b, h, i, : row + 1], wanted)
        assert not found[b, h, i, row + 1 :].any()


def test_some_other_blocks_are_kept_at_random():
    scores = np.random.default_rng(4).random((2, 8, ROWS.size, NUM_BLOCKS)).astype(np.float32) ** 6
    rows, rule = jnp.asarray(ROWS, jnp.int32), RowRule(0.5, 1, 2)

    def kept(share, scores=scores):
        bits = keep(scores, rows, dataclasses.replace(rule, random_block_prob=share))
        assert not (np.asarray(bits)[..., -1] >> (NUM_BLOCKS % 32)).any()
        return np.asarray(sets.unpack(bits, NUM_BLOCKS))

    chosen, some, more = kept(0.0), kept(0.25), kept(0.75)
    causal = np.arange(NUM_BLOCKS) <= ROWS[:, None]
    assert not (some & ~causal).any()
    assert not (chosen & ~some).any() and not (some & ~more).any()
    left = causal & ~chosen
    for found, share in ((some, 0.25), (more, 0.75)):
        # About 1000 skipped blocks, the same in each of two sequences.
        assert (found & left)[0].sum() / left[0].sum() == pytest.approx(share, abs=0.06)
    # Drawn by position, not score: both sequences draw the same blocks.
    both = left[0] & left[1]
    assert both.any() and (some[0] == some[1])[both].all()
    # Heads and rows draw different blocks.
    drawn = kept(0.25, np.zeros_like(scores))[0]
    assert len({drawn[h].tobytes() for h in range(8)}) == 8
    assert (drawn[:, -1, :32] != drawn[:, -2, :32]).any(-1).all()


def test_mass_kept_in_addition_to_blocks_counts_first():
    scores = np.nan_to_num(scores_of(2))
    beside = np.random.default_rng(3).random(scores.shape[:3]).astype(np.float32) * 3
    rule = RowRule(0.8, 1, 2)
    numbers, rows = np.arange(NUM_BLOCKS), jnp.asarray(ROWS, jnp.int32)
    bits = keep(scores, rows, rule, column_mass=beside)
    found = np.asarray(bits)[..., numbers // 32] >> (numbers % 32) & 1 > 0
    masses = np.asarray(masses_of(np.concatenate([scores, beside[..., None]], -1))).astype(int)
    for b, h, i in np.ndindex(scores.shape[:3]):
        row, mass = ROWS[i], masses[b, h, i]
        mass = [mass[-1], *mass[: row + 1]]
        forced = np.append(True, (numbers < 1) | (row - numbers < 2))[: row + 2]
        wanted = pick(mass, forced, -(-sum(mass) * round(0.8 * 2**15) // 2**15))
        np.testing.assert_array_equal(found[b, h, i, : row + 1], wanted[1:])


@pytest.mark.parametrize("other", [1.0, 0.4999 * 2**-15, 0.0])
def test_masses_of_the_longest_row_do_not_overflow(other):
    scores = np.full(MAX_BLOCKS, other, np.float32)
    scores[7] = 1.0
    masses = np.asarray(masses_of(scores)).astype(int)
    assert 2**30 - 2**15 <= masses.sum() < 2**31
    assert masses[7] == masses.max() and len(set(np.delete(masses, 7))) == 1


def test_masses_are_integer_fractions_of_the_row():
    scores = np.nan_to_num(scores_of(1)).astype(np.float64)
    masses = np.asarray(masses_of(scores.astype(np.float32))).astype(int)
    total = scores.sum(-1, keepdims=True)
    shares = scores / np.where(total > 0, total, 1)
    # The total in the denominator is known to about one part in 2^20.
    np.testing.assert_allclose(masses / 2**30, shares, rtol=1e-5, atol=1e-9)
    assert masses.sum(-1).max() < 2**31 and (masses[0, 3] == 0).all()
