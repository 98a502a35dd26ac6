"""Replicas timed one after another: how times are combined, and all of it in miniature."""

import pytest

from benchmarks.step import replicas
from benchmarks.step.drawn_batches import ORDERS
from benchmarks.step.replicas import Found

MINIATURE = (
    "--config", "tiny", "--groups", "2", "--parts", "2", "--batches", "1",
    "--documents", "150", "900", "--start", "1.3",
)  # fmt: skip
SIZES = (
    "--parallel.nodes=1", "--parallel.devices_per_node=1", "--data.seq_len=1024",
    "--sparsity.min_sparse_tokens=256", "--model.num_layers=1", "--model.intermediate_size=64",
    "--model.hidden_size=32", "--model.num_heads=1", "--model.head_dim=16", "--model.remat=none",
)  # fmt: skip


def cells(line: str) -> list[str]:
    return line.strip("| ").split(" | ")


def table(text: str) -> list[dict[str, str]]:
    """Rows by the names of their columns; "measured" follows the name of the one before it."""
    head, _, *rows = [cells(line) for line in text.splitlines() if line.startswith("| ")]
    names = [
        f"{head[i - 1].removesuffix(', predicted')}, measured" if name == "measured" else name
        for i, name in enumerate(head)
    ]
    return [dict(zip(names, line, strict=True)) for line in rows]


def test_a_row_has_predicted_and_measured_values():
    plain = Found(0.25, 1.5, 1.2, 1.25, 1.1)
    even = Found(0.25, 1.0, 1.1, 1.111, 1.01)
    assert cells(even.row("1", "length", plain)) == [
        "1", "length", "0.2500", "1.00", "1.100", "1.111", "+1.0%", "1.010", "1.09 x", "1.13 x",
    ]  # fmt: skip
    unmeasured = Found(0.25, 1.5, 1.2)
    assert cells(Found.mean([unmeasured] * 2).row("mean", "none", unmeasured)) == [
        "mean", "none", "0.2500", "1.50", "1.200", "–", "–", "–", "1.00 x", "–",
    ]  # fmt: skip
    assert Found.mean([plain, even]).measured_s == pytest.approx(1.1805)


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
        assert 1 <= float(x["attention imbalance, predicted"]) < 2
        assert 1 <= float(x["step imbalance, measured"]) < 2
        assert float(x["step s, measured"]) > 0
    assert float(rows[0]["attention imbalance, predicted"]) == pytest.approx(1.3, abs=0.05)
    assert len({x["density"] for x in rows}) == 1  # the same documents


def test_predictions_need_no_device(capsys, monkeypatch):
    monkeypatch.setattr(replicas, "ReplicaTimer", None)
    replicas.main([*MINIATURE, "--predict", *SIZES])
    rows = table(capsys.readouterr().out)
    assert [x["data.balance"] for x in rows] == [*ORDERS, *ORDERS]
    assert float(rows[0]["attention imbalance, predicted"]) == pytest.approx(1.3, abs=0.05)
    assert rows[0]["speedup, predicted"] == "1.00 x" and rows[1]["speedup, predicted"] >= "1.00 x"
    many = ["--batches", "11", "--start", "0"]
    replicas.main([*MINIATURE, *many, "--predict", "--parallel.devices_per_node=2", *SIZES[2:]])
    assert [x["batch"] for x in table(capsys.readouterr().out)] == ["mean"] * len(ORDERS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parallel.replicas=2"], "parallel.replicas=2 cannot be set here"),
        (["--groups", "1"], "--groups: 1 is less than 2"),
        (["--parallel.devices_per_node=2"], "a timed replica must have one device"),
        (["--documents", "1", "900"], "--documents: 1 is less than 2"),
        (["--start", "9"], "--batches=1: 0 of 400 drawn batches"),
    ],
)
def test_bad_input_ends_in_one_sentence(options, message, capsys):
    with pytest.raises(SystemExit) as error:
        replicas.main([*MINIATURE, *SIZES, *options])
    assert error.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
