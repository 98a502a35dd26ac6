"""Groups that run one after the other: what is combined how, and all of it in miniature."""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.step import balance
from benchmarks.step import replicas as groups
from benchmarks.step.drawn_lists import DrawnLists, densities_by_length
from benchmarks.step.group_report import conclusions, row
from benchmarks.step.group_steps import (
    ORDERS,
    Found,
    Times,
    chosen_batches,
    dealt_batches,
    predicted,
)
from mtraining_jax.errors import UserError
from mtraining_jax.sparsity import Shards
from mtraining_jax.sparsity.documents import Documents

MINIATURE = (
    "--config", "tiny", "--groups", "2", "--parts", "2", "--batches", "1", "--repeats", "1",
    "--documents", "150", "900", "--start", "1.3",
)  # fmt: skip
SIZES = (
    "--parallel.nodes=1", "--parallel.devices_per_node=1", "--data.seq_len=1024",
    "--sparsity.dense_below=256", "--model.num_layers=1", "--model.intermediate_size=64",
    "--model.hidden_size=32", "--model.num_heads=1", "--model.head_dim=16", "--model.remat=none",
)  # fmt: skip


def a_run(number_of_groups: int = 2):
    args = argparse.Namespace(config="tiny", groups=number_of_groups, parts=2, seed=0)
    return groups.configured(args, SIZES)[0]


def found(attention_ms, step_ms) -> Found:
    times = Times(np.array(attention_ms, float), np.array(step_ms, float), density=0.25)
    return Found.of(times)


def cells(line: str) -> list[str]:
    return line.strip("| ").split(" | ")


def test_a_step_takes_what_its_slowest_group_takes():
    one = found([100, 300], [1000, 1400])
    assert (one.attention_ms, one.step_ms) == (300, 1400)
    assert one.attention == pytest.approx(1.5) and one.step == pytest.approx(1400 / 1200)
    assert one.rest_ms == pytest.approx(1000) and one.density == 0.25
    # The busiest in attention need not be the slowest.
    assert found([100, 300], [1500, 1400]).step_ms == 1500
    both = Found.mean([one, found([200, 200], [1200, 1200])])
    assert (both.attention_ms, both.step_ms, both.attention) == (250, 1300, 1.25)


def test_a_line_has_what_was_predicted_beside_what_was_measured():
    plain = found([100, 300], [1000, 1200]), found([120, 300], [1020, 1250])
    even = found([200, 200], [1100, 1100]), found([190, 210], [1090, 1111])
    assert cells(row("1", "length", even, plain, comparable=True)) == [
        "1", "length", "0.2500", "0.2500", "1.00", "1.05", "1.000", "1.010", "200", "210", "+5.0%",
        "1.100", "1.111", "+1.0%", "1.09 x", "1.13 x",
    ]  # fmt: skip
    there = cells(row("1", "length", even, plain, comparable=False))
    assert [there[i] for i in (10, 13)] == ["–", "–"]
    pairs = {how: [even] for how in ORDERS} | {"none": [plain]}
    attention, step, cost = conclusions(pairs, [0.01, 0.03])
    assert "1.43 in the order of the data" in attention
    assert "1.05 with `length`, reached" in attention
    assert "+1.8% in the mean and +4.2% at the worst of 4, reached" in step
    assert "+2.00% in the mean of 2 batches, missed" in cost
    slow = dataclasses.replace(even[1], step_ms=1300, attention=1.4)
    attention, step, cost = conclusions(pairs | {"length": [(even[0], slow)]}, [0.01])
    assert "1.40 with `length`, missed" in attention
    assert "+18.2% at the worst of 4, missed" in step and "reached" in cost


def test_all_orders_have_the_packs_of_the_same_batches():
    run = a_run()
    warm, batches = chosen_batches(run, 0, 3, 1.3, (150, 900))
    assert len(warm) == balance.WARM and len(batches) == 3
    dealt = dealt_batches(warm, batches, run)
    assert tuple(dealt) == ORDERS
    for how, steps in dealt.items():
        assert len(steps) == 3
        for step, batch in zip(steps, batches, strict=True):
            assert [len(packs) for packs in step.groups] == [run.parts] * run.groups
            own = [id(pack.lengths) for packs in step.groups for pack in packs]
            assert sorted(own) == sorted(id(pack.lengths) for pack in batch)
            if how == "none":
                assert own == [id(pack.lengths) for pack in batch]
            tuned = how == balance.TUNED
            assert (step.shares != balance.BOUNDS.base).any() == tuned
    starts = [Found.of(predicted(step, run)).attention for step in dealt["none"]]
    assert starts == pytest.approx([1.3] * 3, abs=0.05)
    ends = [Found.of(predicted(step, run)).attention for step in dealt["length"]]
    assert np.mean(ends) < np.mean(starts) - 0.05
    with pytest.raises(UserError, match=r"--batches=3: 0 of 400 drawn batches begin at .* 1\.99"):
        chosen_batches(run, 0, 3, 1.99, (150, 900))


def drawn(lengths: list[int], share: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The mask bool [Hq, NB, NB] that is drawn, and computed pairs over those wanted."""
    seq_len, block = 8192, 128
    pattern = DrawnLists(dense_below=1024)
    documents = Documents.from_lengths([lengths], seq_len, block).blocks()
    shards = Shards(
        jnp.arange(seq_len // block, dtype=jnp.int32), seq_len // block, documents=documents,
        shares=None if share is None else jnp.array([round(share * 2**15)], jnp.int32),
    )
    q = jnp.zeros((1, seq_len, 4, 8))
    index = jax.jit(lambda q: pattern.choose(q, q, shards).index)(q)
    computed = float(index.computed_pairs(seq_len).mean())
    table = densities_by_length(0, seq_len, 1024)
    padded = -(-np.array(lengths) // block) * block
    factor = 1 if share is None else np.interp(share, balance.SHARES, balance.DENSITIES) / 0.152
    density = np.where(padded < 1024, 1, np.minimum(table[lengths] * factor, 1))
    first = jnp.arange(0, seq_len, block)
    mask = index.computes(first, jnp.arange(seq_len // block))[0, ..., 0]
    mask = np.asarray(mask) & np.tri(seq_len // block, dtype=bool)
    return mask, computed / (density @ (padded * (padded + 1) / 2))


def test_documents_compute_the_densities_that_are_drawn():
    for lengths in ([8192], [4000, 1000, 3000], [890, 5000]):
        mask, ratio = drawn(lengths)
        assert ratio == pytest.approx(1, abs=0.03)
    # Documents keep apart, short ones are whole, and what is left behind them is empty.
    assert np.array_equal(mask[:, :7, :7], np.tile(np.tri(7, dtype=bool), (4, 1, 1)))
    assert not mask[:, 7:, :7].any() and not mask[:, 47:].any()
    assert mask[:, 7:47, 7].all() and (mask[0] != mask[1]).any()


def test_a_larger_share_computes_more_of_the_same_pairs():
    masks = {share: drawn([8192], share) for share in (0.85, 0.9, 0.95)}
    assert np.array_equal(masks[0.9][0], drawn([8192])[0])
    for _, ratio in masks.values():
        assert ratio == pytest.approx(1, abs=0.03)
    small, base, large = (mask for mask, _ in masks.values())
    assert (base | small == base).all() and (large | base == large).all()
    assert small.sum() < base.sum() < large.sum()


def test_one_device_runs_all_groups_in_miniature(tmp_path, capsys):
    out = tmp_path / "table.md"
    groups.main([*MINIATURE, "--out", str(out), *SIZES])
    text = out.read_text()
    assert capsys.readouterr().out == text
    assert "No two groups ran at once" in text and "they are not compared" in text
    lines = [cells(line) for line in text.splitlines() if line.startswith("| ")]
    rows = [line for line in lines if len(line) == 16 and line[0] in ("1", "mean")]
    assert [line[:2] for line in rows] == [[x, how] for x in ("1", "mean") for how in ORDERS]
    for _, how, wanted, computed, *numbers in rows:
        assert float(computed) == pytest.approx(float(wanted), abs=0.03), how
        predicted, measured, step_predicted, step_measured = map(float, numbers[:4])
        assert 1 <= predicted < 2 and 1 <= measured < 2
        assert 1 <= step_predicted < 2 and 1 <= step_measured < 2
        assert float(numbers[5]) > 0 and float(numbers[8]) > 0
    assert float(rows[0][4]) == pytest.approx(1.3, abs=0.05)
    assert rows[0][2] == rows[1][2] == rows[2][2]  # the same documents in every order
    (cost,) = (line for line in lines if len(line) == 4 and line[0] == "1")
    before, after = float(cost[1]), float(cost[2])
    assert before > 0 and after > 0


def test_predictions_alone_need_no_device(capsys, monkeypatch):
    monkeypatch.setattr(groups, "Groups", None)
    groups.main([*MINIATURE, "--predict", *SIZES])
    head, _, *rows = map(cells, capsys.readouterr().out.splitlines())
    assert [line[:2] for line in rows] == [[x, how] for x in ("1", "mean") for how in ORDERS]
    plain, _, _, tuned = (dict(zip(head, line, strict=True)) for line in rows[:4])
    assert float(plain["imbalance of attention"]) == pytest.approx(1.3, abs=0.05)
    for line in plain, tuned:
        ms = float(line["attention of the busiest group, ms"]) + float(line["all else, ms"])
        assert float(line["step, s"]) == pytest.approx(ms / 1e3, abs=2e-3)
    assert plain["faster"] == "1.00 x" and tuned["faster"] >= "1.00 x"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--parallel.data=2"], "parallel.data=2 is not to be given here"),
        (["--groups", "1"], "--groups=1: allowed is 2 or more"),
        (["--parallel.devices_per_node=2"], "a group has one device here"),
        (["--documents", "1", "900"], "--documents=1: allowed are 2 tokens or more"),
        (["--start", "9"], "--batches=1: 0 of 400 drawn batches"),
    ],
)
def test_bad_input_ends_in_one_sentence(options, said, capsys):
    with pytest.raises(SystemExit) as error:
        groups.main([*MINIATURE, *SIZES, *options])
    assert error.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
