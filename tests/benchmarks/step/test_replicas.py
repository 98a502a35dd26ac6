"""Replicas timed one after another: how times are combined, and all of it in miniature."""

import pytest

from benchmarks.step import replicas
from benchmarks.step.drawn_batches import ORDERS

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
