"""Replicas timed one after another: how times are combined, and all of it in miniature."""

import numpy as np
import pytest

from benchmarks.step import replicas
from benchmarks.step.drawn_batches import ORDERS, Times
from benchmarks.step.replicas import Found, columns, row

MINIATURE = (
    "--config", "tiny", "--groups", "2", "--parts", "2", "--batches", "1", "--repeats", "1",
    "--documents", "150", "900", "--start", "1.3",
)  # fmt: skip
SIZES = (
    "--parallel.nodes=1", "--parallel.devices_per_node=1", "--data.seq_len=1024",
    "--sparsity.min_sparse_tokens=256", "--model.num_layers=1", "--model.intermediate_size=64",
    "--model.hidden_size=32", "--model.num_heads=1", "--model.head_dim=16", "--model.remat=none",
)  # fmt: skip


def found(attention_ms, step_ms) -> Found:
    times = Times(np.array(attention_ms, float), np.array(step_ms, float), density=0.25)
    return Found.of(times)


def cells(line: str) -> list[str]:
    return line.strip("| ").split(" | ")


def table(text: str) -> list[dict[str, str]]:
    """Rows by the names of their columns; "measured" after each name is joined to it."""
    head, _, *rows = [cells(line) for line in text.splitlines() if line.startswith("| ")]
    names = [
        f"{head[i - 1].removesuffix(', predicted')}, measured" if name == "measured" else name
        for i, name in enumerate(head)
    ]
    return [dict(zip(names, line, strict=True)) for line in rows]


def test_a_step_takes_as_long_as_its_slowest_replica():
    one = found([100, 300], [1000, 1400])
    assert (one.attention_ms, one.step_ms) == (300, 1400)
    assert one.attention == pytest.approx(1.5) and one.step == pytest.approx(1400 / 1200)
    assert one.rest_ms == pytest.approx(1000) and one.density == 0.25
    # The replica with most attention need not be the slowest.
    assert found([100, 300], [1500, 1400]).step_ms == 1500
    both = Found.mean([one, found([200, 200], [1200, 1200])])
    assert (both.attention_ms, both.step_ms, both.attention) == (250, 1300, 1.25)


def test_a_row_has_predicted_and_measured_values():
    plain = found([100, 300], [1000, 1200]), found([120, 300], [1020, 1250])
    even = found([200, 200], [1100, 1100]), found([190, 210], [1090, 1111])
    both = row("1", "length", even, plain)
    assert both == [
        "1", "length", "0.2500", "0.2500", "1.00", "1.05", "1.000", "1.010", "200", "210", "900",
        "900", "1.100", "1.111", "1.09 x", "1.13 x", "+1.0%",
    ]  # fmt: skip
    assert len(columns(True)) == len(both)
    assert row("1", "none", plain[:1], plain[:1])[2:] == [
        "0.2500", "1.50", "1.091", "300", "900", "1.200", "1.00 x",
    ]  # fmt: skip
    assert len(columns(False)) == 9


def test_one_device_runs_all_replicas_in_miniature(tmp_path, capsys):
    out = tmp_path / "table.md"
    replicas.main([*MINIATURE, "--out", str(out), *SIZES])
    text = out.read_text()
    assert capsys.readouterr().out == text
    assert "No two replicas ran at the same time" in text
    rows = table(text)
    assert [(x["batch"], x["data.balance"]) for x in rows] == [
        (batch, how) for batch in ("1", "mean") for how in ORDERS
    ]
    for x in rows:
        wanted, computed = float(x["density, predicted"]), float(x["density, measured"])
        assert computed == pytest.approx(wanted, abs=0.03), x
        for name in ("attention imbalance", "step imbalance"):
            assert 1 <= float(x[f"{name}, predicted"]) < 2
            assert 1 <= float(x[f"{name}, measured"]) < 2
        assert float(x["attention of the slowest, ms, measured"]) > 0
        assert float(x["step, s, measured"]) > 0
    assert float(rows[0]["attention imbalance, predicted"]) == pytest.approx(1.3, abs=0.05)
    assert len({x["density, predicted"] for x in rows[:3]}) == 1  # the same documents


def test_predictions_need_no_device(capsys, monkeypatch):
    monkeypatch.setattr(replicas, "ReplicaTimer", None)
    replicas.main([*MINIATURE, "--predict", *SIZES])
    rows = table(capsys.readouterr().out)
    assert [x["data.balance"] for x in rows] == [*ORDERS, *ORDERS]
    assert float(rows[0]["attention imbalance"]) == pytest.approx(1.3, abs=0.05)
    for x in rows:
        ms = float(x["attention of the slowest, ms"]) + float(x["rest, ms"])
        assert float(x["step, s"]) == pytest.approx(ms / 1e3, abs=2e-3)
    assert rows[0]["speedup"] == "1.00 x" and rows[3]["speedup"] >= "1.00 x"
    many = ["--batches", "11", "--start", "0"]
    replicas.main([*MINIATURE, *many, "--predict", "--parallel.devices_per_node=2", *SIZES[2:]])
    assert [x["batch"] for x in table(capsys.readouterr().out)] == ["mean"] * len(ORDERS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parallel.replicas=2"], "parallel.replicas=2 cannot be set here"),
        (["--groups", "1"], "--groups=1 must be at least 2"),
        (["--parallel.devices_per_node=2"], "a timed replica must have one device"),
        (["--documents", "1", "900"], "--documents=1 must be at least 2 tokens"),
        (["--start", "9"], "--batches=1: 0 of 400 drawn batches"),
    ],
)
def test_bad_input_ends_in_one_sentence(options, message, capsys):
    with pytest.raises(SystemExit) as error:
        replicas.main([*MINIATURE, *SIZES, *options])
    assert error.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
