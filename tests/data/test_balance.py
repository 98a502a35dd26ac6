"""Load balancing of sequences between data-parallel replicas."""

import itertools
import json
import threading

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtraining_jax.data.balance import (
    DELAY,
    Balance,
    Densities,
    Repositioned,
    even_order,
    imbalance,
    length_classes,
    num_classes,
)
from mtraining_jax.utils.errors import UserError
from tests.data.common import loader_of, section

EOS, G, S, B = 9, 4, 32, 8
START = np.array([1.0, 1.0, 0.8, 0.1])


def best_imbalance(weights, groups):
    """The optimum, by exhaustive search over assignments of equal size."""
    size = len(weights) // groups

    def heaviest(left):
        if not left:
            return 0.0
        first, rest = left[0], left[1:]
        found = np.inf
        for others in itertools.combinations(rest, size - 1):
            load = weights[first] + sum(weights[i] for i in others)
            found = min(found, max(load, heaviest([i for i in rest if i not in others])))
        return found

    return heaviest(list(range(len(weights)))) / (sum(weights) / groups)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.floats(0.01, 100), min_size=8, max_size=8), st.sampled_from([(2, 2), (4, 1)]))
def test_even_order_keeps_all_and_is_never_worse(weights, shape):
    weights, (groups, parts) = np.array(weights), shape
    order = even_order(weights, groups, parts)
    assert sorted(order) == list(range(8)) and order.dtype == np.int64
    assert imbalance(weights[order], groups) <= imbalance(weights, groups)
    if not np.array_equal(order, np.arange(8)):
        # Descending order in each replica, so that micro-batches are balanced too.
        assert (np.diff(weights[order].reshape(groups, -1)) <= 0).all()


@pytest.mark.parametrize("groups", [2, 4])
def test_even_order_is_near_the_optimum(groups):
    rng = np.random.default_rng(0)
    found = []
    for _ in range(100):
        # Weights differ by about an order of magnitude, as with mixed documents.
        weights = rng.lognormal(0, 0.8, 8)
        assigned = imbalance(weights[even_order(weights, groups)], groups)
        found.append(assigned / best_imbalance(weights, groups))
    assert min(found) >= 1 - 1e-12
    assert max(found) <= 1.12 and np.mean(found) <= 1.02


def test_balanced_order_is_kept():
    assert even_order(np.ones(8), 4, 2).tolist() == list(range(8))
    assert even_order(np.arange(1.0, 9), 1, 2).tolist() == list(range(8))
    with pytest.raises(ValueError, match="8 sequences for 2 replicas x 3 micro-batches"):
        even_order(np.ones(8), 2, 3)


def test_length_classes_are_powers_of_two_in_blocks():
    lengths = np.array([1, 4, 5, 8, 9, 12, 13, 16, 17, 31, 32])
    assert length_classes(lengths, G).tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3]
    assert num_classes(S // G) == 4 and num_classes(1) == 1


# ---- moving averages -----------------------------------------------------------------------------


def test_averages_match_their_definition_with_a_fixed_delay():
    densities, average, after = Densities(np.array([0.5, 1.0])), 0.5, [0.5]
    for step in range(1, 12):
        measured = step / 20
        average = 0.9 * average + 0.1 * measured
        after.append(average)
        assert densities.known_before(step)
        # The second class is never measured.
        densities.add(step, np.array([measured, np.nan]))
        expected = after[max(0, step + 1 - DELAY)]
        np.testing.assert_allclose(densities.before(step + 1), [expected, 1.0], rtol=1e-12)
    with pytest.raises(ValueError, match="step 13 is added after step 11"):
        densities.add(13, np.zeros(2))


def test_a_batch_waits_for_its_density_until_the_loader_is_repositioned():
    densities, found = Densities(np.array([0.5])), []

    def wait(step):
        try:
            found.append(densities.before(step, generation)[0])
        except Repositioned:
            found.append("repositioned")

    generation = densities.generation
    for act in (lambda: densities.add(1, np.array([0.6])), lambda: densities.go_to(0, None)):
        thread = threading.Thread(target=wait, args=(len(found) + DELAY + 1,))
        thread.start()
        act()
        thread.join(10)
        assert not thread.is_alive()
    assert found == [pytest.approx(0.51), "repositioned"]
    with pytest.raises(Repositioned):
        densities.before(1, generation)


@pytest.mark.parametrize("state", [[1], {}, {"1": ["a"]}, {"1": [0.1, 0.2]}, {"x": [0.1]}])
def test_invalid_states_of_densities(state):
    reasons = "(are not readable|do not have)"
    with pytest.raises(UserError, match=f"the saved densities of the data {reasons}"):
        Densities(np.array([0.5])).go_to(1, state)


# ---- batches -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """40 packs of 32 tokens in batches of 8, with documents of 2 to 32 tokens."""
    folder = tmp_path_factory.mktemp("packs")
    rng = np.random.default_rng(1)
    lengths = [S if rng.random() < 0.3 else int(rng.integers(2, 25)) for _ in range(100)]
    ids = 10 + np.arange(sum(lengths))
    ids[np.cumsum(lengths) - 1] = EOS
    np.save(folder / "a.npy", ids.astype(np.uint16))
    return section(
        10_000,
        source="tokens",
        paths=(str(folder),),
        mode="pack",
        eos=EOS,
        seq_len=S,
        batch_size=B,
        shuffle=True,
    )


def squares(lengths, densities):
    return float((densities * lengths.astype(float) ** 2).sum())


def balanced(data, name="length", replicas=2, parts=2, cost=squares, **local):
    densities = Densities(START) if name == "density" else None
    balance = None if name == "none" else Balance(name, replicas, parts, G, cost, densities)
    return loader_of(data, 10_000, block_size=G, balance=balance, **local)


def measured_in(step):
    return np.array([1.0, np.nan, 0.9, step % 3 / 3])


def batches_of(loader, steps, first=1):
    """Reads batches and adds different densities after each."""
    found = []
    for step in range(first, first + steps):
        found.append(next(loader))
        loader.measured(step, measured_in(step))
    loader.close()
    return found


def assert_same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def weights_of(loader):
    return np.array([squares(own, 1.0) for own in map(lengths_of(loader), loader.sequences)])


def lengths_of(loader):
    return lambda sequence: loader.packs.pieces(int(sequence))[1]


def test_sequences_are_reordered_within_a_batch_only(data):
    plain, even = balanced(data, "none"), balanced(data)
    assert even.description == plain.description + "; data.balance = length"
    gains = []
    for _ in range(5):
        before, after = next(plain), next(even)
        order = even_order(weights_of(plain), 2, 2)
        assert (even.sequences == plain.sequences[order]).all()
        assert_same(after, jax.tree.map(lambda rows, order=order: rows[order], before))
        gains.append(imbalance(weights_of(plain), 2) / imbalance(weights_of(even), 2))
    plain.close(), even.close()
    assert min(gains) >= 1 and max(gains) > 1.1


def test_batches_are_ordered_by_the_step_that_reads_them(data):
    steps = []

    class Recorded(Balance):
        def order(self, step, lengths, generation=None):
            steps.append(step)
            return super().order(step, lengths, generation)

    loader = loader_of(data, 10_000, block_size=G, balance=Recorded("length", 2, 2, G, squares))
    next(loader), next(loader)
    loader.close()
    assert steps[:2] == [1, 2]


def test_balancing_by_measured_density_agrees_between_processes(data):
    whole = balanced(data, "density")
    batches = batches_of(whole, 12)
    halves = [
        batches_of(balanced(data, "density", rows=np.arange(4) + 4 * half), 12) for half in (0, 1)
    ]
    for batch, *parts in zip(batches, *halves, strict=True):
        assert_same(jax.tree.map(lambda *rows: np.concatenate(rows), *parts), batch)
    # Reference: with the densities known four steps before.
    by_hand, plain = Densities(START), balanced(data, "none")
    moved = []
    for step, batch in enumerate(batches, 1):
        raw = next(plain)
        known = by_hand.before(step)
        weights = []
        for sequence in plain.sequences:
            own = lengths_of(plain)(sequence)
            weights.append(squares(own, known[length_classes(own, G)]))
        order = even_order(np.array(weights), 2, 2)
        np.testing.assert_array_equal(batch["tokens"], raw["tokens"][order])
        moved.append(not np.array_equal(order, even_order(weights_of(plain), 2, 2)))
        by_hand.add(step, measured_in(step))
    plain.close()
    assert any(moved)  # differs from balancing by length


def test_a_resumed_run_reads_the_same_batches(data):
    first = balanced(data, "density")
    expected = batches_of(balanced(data, "density"), 12)
    begun = []
    for step in range(1, 8):
        begun.append(next(first))
        first.measured(step, measured_in(step))
    state = json.loads(json.dumps(first.get_state()))
    first.close()
    resumed = balanced(data, "density")
    next(resumed)
    resumed.set_state(state)  # while prefetched batches wait for densities
    assert resumed.get_state() == state
    for left, right in zip(expected, [*begun, *batches_of(resumed, 5, first=8)], strict=True):
        assert_same(left, right)
    # A checkpoint without balancing has no densities: they start from their initial values.
    fresh = balanced(data, "density")
    fresh.set_state({name: x for name, x in state.items() if name != "densities"})
    batches_of(fresh, 2, first=8)


def test_error_without_measured_densities(data):
    loader = balanced(data, "density")
    for _ in range(DELAY):
        next(loader)
    with pytest.raises(RuntimeError, match="the batch of step 5 needs densities"):
        next(loader)
    loader.close()


def test_balancing_without_effect_is_described(data, tmp_path):
    one = balanced(data, replicas=1)
    assert one.description.endswith(
        "data.balance = length has no effect with a single data-parallel replica"
    )
    np.testing.assert_array_equal(next(one)["tokens"], next(balanced(data, "none"))["tokens"])
    np.save(tmp_path / "a.npy", np.arange(200, dtype=np.uint16))
    plain = section(10_000, source="tokens", paths=(str(tmp_path),), seq_len=4, batch_size=8)
    joined = balanced(plain, "density")
    assert "has no effect: sequences without documents have equal work" in joined.description
    assert [next(joined)["tokens"][0, 0] for _ in range(6)] == [0, 32, 64, 96, 128, 160]
