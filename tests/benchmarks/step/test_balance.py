"""The model of even groups: its parts by hand, and all of its tables on a few steps."""

import functools

import numpy as np
import pytest

from benchmarks.step import balance
from mtraining_jax.data.balance import imbalance
from mtraining_jax.latency import documents_ms


@functools.cache
def a_run():
    return balance.setting(131072, ranks=4, groups=2, parts=2)


def test_densities_are_those_of_the_anchors():
    rng = np.random.default_rng(0)
    for length, wanted in ((32768, 0.152), (524288, 0.063), (8000, 1.0), (8192, 0.236)):
        found = balance.true_densities(rng, np.full(4000, length))
        assert np.median(found) == pytest.approx(wanted, rel=0.03)
    lengths = balance.mixed(rng, 2**24, 2**19)
    assert lengths.max() <= 2**19 and lengths.sum() == pytest.approx(2**24, rel=0.2)


def test_a_step_takes_what_its_busiest_group_takes():
    run = a_run()
    packs = [balance.Pack(np.array([n]), np.array([0.1])) for n in (10_000, 20_000, 30_000, 40_000)]
    ms = [documents_ms(pack.lengths, pack.densities, run.size).sum() for pack in packs]
    found = balance.follow([packs], run, 0)
    assert found.seconds == pytest.approx((ms[2] + ms[3] + run.rest_ms) / 1e3)
    assert found.lock_step == pytest.approx((ms[2] + ms[3] + run.rest_ms) / 1e3)
    assert found.attention == pytest.approx(imbalance(ms, 2))
    for how in balance.WAYS[1:]:
        # The longest and the shortest together.
        even = balance.follow(balance.dealt([packs], how, run), run, 0)
        assert even.attention == pytest.approx(imbalance([ms[3], ms[0], ms[2], ms[1]], 2))
        assert even.seconds == pytest.approx((ms[3] + ms[0] + run.rest_ms) / 1e3)
    assert len(balance.starting_at([packs, packs], run, found.attention)) == 2
    assert not balance.starting_at([packs], run, found.attention + 0.1)


def test_tuned_groups_come_near_each_other():
    run, rng = a_run(), np.random.default_rng(0)
    lengths = [np.array([n, 128]) for n in (131072 - 128, 100_000, 110_000, 90_000)]
    batches = [[balance.Pack(x, balance.true_densities(rng, x)) for x in lengths]] * 30
    tuning = balance.Tuning(run, rng)
    first, *_, last = [
        imbalance(balance.times(batch, run.size), 2) for batch in tuning.apply(batches)
    ]
    assert last < 1.03 < imbalance(balance.times(batches[0], run.size), 2) < 1.4
    assert len(tuning.shares) == 30 and tuning.infeasible[-1] == 0
    assert 0.85 <= tuning.shares[-1][0] < 0.9 < tuning.shares[-1][1] <= 0.97
    assert balance.true_densities(rng, lengths[0])[1] == 1  # short documents do not respond


def test_unpacked_documents_take_the_time_of_what_they_are_filled_up_to():
    run, lengths = a_run(), np.array([8192, 8193, 16384, 9000])
    for bucket, tokens in (
        (balance.powers_of_two, [8192, 16384, 16384, 16384]),
        (balance.multiples_of_8k, [8192, 16384, 16384, 16384]),
    ):
        assert bucket(lengths).tolist() == tokens
    assert balance.powers_of_two(np.array([70_000])) == 73728
    assert balance.multiples_of_8k(np.array([30_000])) == 32768
    us, uneven = balance.unpacked(
        np.random.default_rng(0), run, lengths, balance.powers_of_two, documents=4
    )
    rest = run.rest_ms * 32768 / 262144
    assert us > 1e3 * rest / lengths.sum()
    assert 1 < uneven < 2


def test_all_tables_are_printed(tmp_path, monkeypatch):
    monkeypatch.setattr(balance, "WARM", 2)
    monkeypatch.setattr(balance, "starting_at", lambda batches, *_: batches[:4])
    out = tmp_path / "found.md"
    text = balance.main(["--steps", "4", "--out", str(out)])
    assert out.read_text() == text
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(rows) == 1 + 3 * 6 + 1 + 6 + 1 + 5
    faster = [row.split(" | ")[-1] for row in rows if row.endswith("x |")]
    assert all(0.5 < float(cell.removesuffix(" x |")) < 3 for cell in faster)
