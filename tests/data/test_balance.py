"""Even groups: who gets which sequence, by what was measured, on every process and after a stop."""

import itertools
import json
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtraining_jax.data.balance import Balance, even_order, imbalance
from mtraining_jax.data.densities import DELAY, Densities, OtherPlace, length_classes, num_classes
from mtraining_jax.errors import UserError
from tests.data.common import loader_of, section

EOS, G, S, B = 9, 4, 32, 8
START = np.array([1.0, 1.0, 0.8, 0.1])


def best_imbalance(weights, groups):
    """By trying every way to deal equally many to each group."""
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
        # The heaviest of each group come first: micro-batches of all groups are alike.
        assert (np.diff(weights[order].reshape(groups, -1)) <= 0).all()


@pytest.mark.parametrize("groups", [2, 4])
def test_even_order_is_near_the_optimum(groups):
    rng = np.random.default_rng(0)
    found = []
    for _ in range(100):
        # Packs of an order of magnitude, as the attention of mixed documents differs.
        weights = rng.lognormal(0, 0.8, 8)
        dealt = imbalance(weights[even_order(weights, groups)], groups)
        found.append(dealt / best_imbalance(weights, groups))
    assert min(found) >= 1 - 1e-12
    assert max(found) <= 1.12 and np.mean(found) <= 1.02


def test_order_of_equal_weights_stays():
    assert even_order(np.ones(8), 4, 2).tolist() == list(range(8))
    assert even_order(np.arange(1.0, 9), 1, 2).tolist() == list(range(8))
    with pytest.raises(ValueError, match="8 sequences for 2 groups of 3 parts"):
        even_order(np.ones(8), 2, 3)


def test_classes_of_length_are_powers_of_two_in_blocks():
    lengths = np.array([1, 4, 5, 8, 9, 12, 13, 16, 17, 31, 32])
    assert length_classes(lengths, G).tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3]
    assert num_classes(S // G) == 4 and num_classes(1) == 1


# ---- averages of what was measured ---------------------------------------------------------------


def test_averages_are_those_of_the_definition_a_fixed_number_of_steps_late():
    densities, average, after = Densities(np.array([0.5, 1.0])), 0.5, [0.5]
    for step in range(1, 12):
        measured = step / 20
        average = 0.9 * average + 0.1 * measured
        after.append(average)
        assert densities.known_before(step)
        # The second class was never seen.
        densities.add(step, np.array([measured, np.nan]))
        expected = after[max(0, step + 1 - DELAY)]
        np.testing.assert_allclose(densities.before(step + 1), [expected, 1.0], rtol=1e-12)
    with pytest.raises(ValueError, match="step 13 is added after step 11"):
        densities.add(13, np.zeros(2))


def test_a_batch_waits_for_its_density_and_not_beyond_a_change_of_place():
    densities, found = Densities(np.array([0.5])), []

    def wait(step):
        try:
            found.append(densities.before(step, place)[0])
        except OtherPlace:
            found.append("other place")

    place = densities.place
    for act in (lambda: densities.add(1, np.array([0.6])), lambda: densities.go_to(0, None)):
        thread = threading.Thread(target=wait, args=(len(found) + DELAY + 1,))
        thread.start()
        act()
        thread.join(10)
        assert not thread.is_alive()
    assert found == [pytest.approx(0.51), "other place"]
    with pytest.raises(OtherPlace):
        densities.before(1, place)


@pytest.mark.parametrize("state", [[1], {}, {"1": ["a"]}, {"1": [0.1, 0.2]}, {"x": [0.1]}])
def test_densities_that_cannot_be_read(state):
    with pytest.raises(UserError, match="the saved densities of the data are not"):
        Densities(np.array([0.5])).go_to(1, state)


# ---- batches -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """40 packs of 32 tokens in batches of 8, of documents of 2 to 32 tokens."""
    folder = tmp_path_factory.mktemp("packs")
    rng = np.random.default_rng(1)
    lengths = [S if rng.random() < 0.3 else int(rng.integers(2, 25)) for _ in range(100)]
    ids = 10 + np.arange(sum(lengths))
    ids[np.cumsum(lengths) - 1] = EOS
    np.save(folder / "a.npy", ids.astype(np.uint16))
    return section(
        10_000, source="tokens", paths=(str(folder),), mode="pack", eos=EOS, seq_len=S,
        batch_size=B, shuffle=True,
    )  # fmt: skip


def squares(lengths, densities):
    return float((densities * lengths.astype(float) ** 2).sum())


def balanced(data, name="length", groups=2, parts=2, weigh=squares, **local):
    densities = Densities(START) if name == "density" else None
    balance = None if name == "none" else Balance(name, groups, parts, G, weigh, densities)
    return loader_of(data, 10_000, block_size=G, balance=balance, **local)


def measured_in(step):
    return np.array([1.0, np.nan, 0.9, step % 3 / 3])


def told(loader, steps, first=1):
    """Batches, each followed by what its step measured: another density in each step."""
    found = []
    for step in range(first, first + steps):
        found.append(next(loader))
        loader.measured(step, measured_in(step))
    loader.close()
    return found


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])


def weights_of(loader):
    return np.array([squares(own, 1.0) for own in map(lengths_of(loader), loader.sequences)])


def lengths_of(loader):
    return lambda sequence: loader.packs.pieces(int(sequence))[1]


def test_sequences_change_places_within_their_batch_alone(data):
    plain, even = balanced(data, "none"), balanced(data)
    assert even.description == plain.description + "; data.balance = length"
    gains = []
    for _ in range(5):
        before, after = next(plain), next(even)
        order = even_order(weights_of(plain), 2, 2)
        assert (even.sequences == plain.sequences[order]).all()
        assert_same(after, {name: rows[order] for name, rows in before.items()})
        gains.append(imbalance(weights_of(plain), 2) / imbalance(weights_of(even), 2))
    plain.close(), even.close()
    assert min(gains) >= 1 and max(gains) > 1.1


def test_measured_densities_decide_and_processes_agree(data):
    whole = balanced(data, "density")
    batches = told(whole, 12)
    halves = [told(balanced(data, "density", rows=np.arange(4) + 4 * half), 12) for half in (0, 1)]
    for batch, *parts in zip(batches, *halves, strict=True):
        assert_same({name: np.concatenate([x[name] for x in parts]) for name in batch}, batch)
    # By hand: what was known four steps before.
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
    assert any(moved)  # another order than lengths alone would give


def test_a_resumed_run_reads_the_same_batches(data):
    first = balanced(data, "density")
    expected = told(balanced(data, "density"), 12)
    begun = []
    for step in range(1, 8):
        begun.append(next(first))
        first.measured(step, measured_in(step))
    state = json.loads(json.dumps(first.get_state()))
    first.close()
    resumed = balanced(data, "density")
    next(resumed)
    resumed.set_state(state)  # while batches wait for densities of the place before
    assert resumed.get_state() == state
    for left, right in zip(expected, [*begun, *told(resumed, 5, first=8)], strict=True):
        assert_same(left, right)
    # A checkpoint of a run without balance says nothing of densities: they begin anew.
    anew = balanced(data, "density")
    anew.set_state({name: x for name, x in state.items() if name != "densities"})
    told(anew, 2, first=8)


def test_densities_must_be_told(data):
    loader = balanced(data, "density")
    for _ in range(DELAY):
        next(loader)
    with pytest.raises(RuntimeError, match="the batch of step 5 needs densities"):
        next(loader)
    loader.close()


def test_what_cannot_be_balanced_stays_and_says_so(data, tmp_path):
    one = balanced(data, groups=1)
    assert one.description.endswith("data.balance = length leaves their order: there is one group "
                                    "of devices")
    np.testing.assert_array_equal(next(one)["tokens"], next(balanced(data, "none"))["tokens"])
    np.save(tmp_path / "a.npy", np.arange(200, dtype=np.uint16))
    plain = section(10_000, source="tokens", paths=(str(tmp_path),), seq_len=4, batch_size=8)
    joined = balanced(plain, "density")
    assert "leaves their order: without documents all have the same pairs" in joined.description
    assert [next(joined)["tokens"][0, 0] for _ in range(6)] == [0, 32, 64, 96, 128, 160]
