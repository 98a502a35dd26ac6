"""Tuned mass fractions of replicas, in simulations with known densities."""

import numpy as np
import pytest

from mtraining_jax.data.balance import length_classes
from mtraining_jax.tools.balance.density_response import DensityResponse, ReplicaDocuments
from mtraining_jax.tools.balance.mass_fractions import FractionTuning
from mtraining_jax.tools.plan.kernel_times import AttentionSize, documents_ms
from mtraining_jax.utils.errors import UserError

BLOCK, SEQ, LAYERS, CLASSES, DENSE_BELOW = 128, 65536, 3, 10, 4096
SIZE = AttentionSize(num_layers=LAYERS, num_heads=16, head_dim=128, ranks=4)
BASE, LOW, HIGH = 0.9, 0.85, 0.97
ASSUMED = np.full(CLASSES, 0.15)


class World:
    """True densities, by length and by mass fraction, with a different response in each layer."""

    powers = np.array([0.5, 1.0, 2.0])
    # Of SmolLM2-135M at 32768 tokens: benchmarks/results/frontier-32768-h200-2026-11-22.md.
    curve = [0.8, 0.85, 0.9, 0.95, 0.97], np.log([0.096, 0.118, 0.152, 0.215, 0.26])

    def density(self, lengths, share, power):
        """Float [d] of documents in a layer."""
        growth = np.interp(share, *self.curve) - np.interp(BASE, *self.curve)
        own = 0.4 * 0.8 ** length_classes(lengths, BLOCK) * np.exp(power * growth)
        padded = -(-lengths // BLOCK) * BLOCK
        return np.where(padded < DENSE_BELOW, 1.0, np.minimum(own, 1.0))

    def ms(self, rows, shares):
        """Time of a replica's rows, with fractions [L]."""
        lengths = np.concatenate(rows)
        each = [
            documents_ms(lengths, self.density(lengths, *of_layer), SIZE).sum()
            for of_layer in zip(shares, self.powers, strict=True)
        ]
        return np.mean(each)

    def measured(self, rows, shares):
        """Densities [L] of a replica, mean over its rows, as the devices report them."""
        found = []
        for of_layer in zip(shares, self.powers, strict=True):
            of_rows = []
            for lengths in rows:
                padded = -(-lengths // BLOCK) * BLOCK
                pairs = padded * (padded + 1) / 2
                of_rows.append((self.density(lengths, *of_layer) * pairs).sum() / pairs.sum())
            found.append(np.mean(of_rows))
        return np.array(found)


def pack(rng, longest):
    """Lengths of documents that fill a sequence."""
    lengths, room = [], SEQ
    while room >= 2 * BLOCK:
        lengths.append(min(int(rng.integers(BLOCK, longest)), room // BLOCK * BLOCK))
        room -= -(-lengths[-1] // BLOCK) * BLOCK
    return np.array(lengths)


def groups_of(rng):
    """Rows of four replicas, each with sequences of shorter or longer documents."""
    longest = rng.permutation([6000, 12000, 20000, 30000])
    return [[pack(rng, n), pack(rng, n)] for n in longest]


def tuning(anchor):
    return FractionTuning(LOW, HIGH, anchor, SIZE)


def documents_of(rows):
    return [ReplicaDocuments(own, BLOCK, DENSE_BELOW) for own in rows]


def test_replicas_converge_to_the_anchor_or_a_bound():
    # The assumed densities are wrong by up to a factor of two, and so are the exponents.
    rng, world = np.random.default_rng(0), World()
    response, off = DensityResponse.start(ASSUMED, BASE, LAYERS), []
    base = np.full(LAYERS, BASE)
    for _ in range(60):
        rows = groups_of(rng)
        documents = documents_of(rows)
        tuned = tuning("mean").tune(documents, response)
        true = np.array([world.ms(*x) for x in zip(rows, tuned.fractions, strict=True)])
        target = np.mean([world.ms(own, base) for own in rows])
        at_bound = np.isclose(tuned.fractions, LOW) | np.isclose(tuned.fractions, HIGH)
        off.append((true / target - 1)[~at_bound.all(1)])
        measured = np.array([world.measured(*x) for x in zip(rows, tuned.fractions, strict=True)])
        response = response.after(documents, tuned.fractions, measured)
    first, last = (np.abs(np.concatenate(part)) for part in (off[:5], off[40:]))
    assert last.size > 20 and first.max() > 0.1
    assert np.sqrt((last**2).mean()) < 0.015 and np.quantile(last, 0.9) < 0.02
    assert (np.diff(response.exponents) > 0.3).all()  # like the true ones of the layers


@pytest.mark.parametrize("anchor", ["mean", "min", "max"])
def test_a_replica_takes_the_fraction_that_reaches_the_anchor(anchor):
    rng = np.random.default_rng(1)
    documents = documents_of(groups_of(rng))
    level, exponents = np.linspace(0, -1, CLASSES), np.array([0.5, 1.0, 2.0])
    response = DensityResponse(ASSUMED, BASE, level, exponents, np.ones(LAYERS))
    found = tuning(anchor).tune(documents, response)
    known = response.densities

    def ms(own, share):
        """Time with one fraction for all layers, each with a different factor."""
        factor = np.mean([(0.18 / (1.08 - share)) ** x for x in response.exponents])
        return documents_ms(own.lengths, own.densities(known, factor), SIZE).sum()

    untuned = np.array([ms(own, BASE) for own in documents])
    np.testing.assert_allclose(found.untuned_ms, untuned)
    target = getattr(np, anchor)(untuned)
    for m, own in enumerate(documents):
        lowest, highest = ms(own, LOW), ms(own, HIGH)
        wanted = np.clip(target, lowest, highest)
        np.testing.assert_allclose(found.tuned_ms[m], wanted, rtol=1e-6)
        assert found.infeasible[m] == (lowest > target)
        shares = found.fractions[m]
        if wanted in (lowest, highest):
            assert (shares == (LOW if wanted == lowest else HIGH)).all()
        elif np.isclose(target, untuned[m]):
            assert (shares == BASE).all()  # bit-identical
        else:
            assert (np.sign(shares - BASE) == np.sign(target - untuned[m])).all()
    assert found.infeasible.any() == (anchor != "max")


def test_a_replica_of_dense_documents_teaches_nothing_and_keeps_a_bound():
    rows = [[np.array([600, 3000])], [np.array([60000])]]
    documents = documents_of(rows)
    response = DensityResponse.start(ASSUMED, BASE, LAYERS)
    tuned = tuning("mean").tune(documents, response)
    assert (tuned.fractions[0] == HIGH).all() and not tuned.infeasible[0]
    assert tuned.tuned_ms[0] == tuned.untuned_ms[0]
    measured = np.array([[1.0] * LAYERS, [0.04] * LAYERS])
    after = response.after(documents, tuned.fractions, measured)
    assert after.level[8] < 0 and not after.level[:8].any()
    np.testing.assert_array_equal(after.variance, response.variance)
    # The same for a step that was not finite.
    assert response.after(documents, tuned.fractions, measured * np.nan) is response


def test_saved_state_is_restored_and_other_sizes_are_refused():
    assumed = np.ones(3)
    response = DensityResponse(assumed, BASE, np.arange(3) / 7, np.arange(2) / 3, np.ones(2))
    back = DensityResponse.start(assumed, BASE, 2).with_state(response.state())
    for name in ("level", "covariance", "variance"):
        np.testing.assert_array_equal(getattr(back, name), getattr(response, name))
    with pytest.raises(UserError, match="has 3 values of level, but this run needs 4"):
        DensityResponse.start(np.ones(4), BASE, 2).with_state(response.state())
    with pytest.raises(UserError, match="no valid state of sparsity.tune"):
        response.with_state({"level": None})


def test_densities_and_weights_of_documents_in_numbers():
    """Two rows, with documents of 1 and 3 blocks, and of 5 blocks; 23 tokens fill 24."""
    documents = ReplicaDocuments([np.array([8, 23]), np.array([40])], 8, 24)
    by_class = np.array([0.5, 0.25, 0.125])
    assert documents.densities(by_class).tolist() == [1, 0.25, 0.125]
    assert documents.densities(by_class, 6.0).tolist() == [1, 1, 0.75]
    pairs = 24 * 25 / 2, 8 * 9 / 2
    in_row = pairs[0] / sum(pairs)
    assert documents.sparse_weight == pytest.approx((in_row + 1) / 2)
    weights = documents.class_weights(by_class)
    np.testing.assert_allclose(weights, [0, 0.25 * in_row / 2, 0.125 / 2])
