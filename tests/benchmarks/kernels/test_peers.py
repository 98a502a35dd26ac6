"""Baselines in torch: their problems, and what a worker sends, without torch."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import workers
from benchmarks.kernels.cases import Row, Shape
from benchmarks.kernels.masks import SlashMask, Work
from benchmarks.kernels.peers.jobs import Peers, padded

SHAPE = Shape(512, 2, 1, 64)
MASK = SlashMask(4, (np.array([0, 2]), np.array([0])), (np.array([5]), np.array([5, 300])))


def ran(*jobs):
    """What workers sent and logged."""
    sent, logged = [], []
    workers.measure(jobs, len(jobs), sent.append, logged.append)
    return sent, logged


def fake(folder, *values):
    """A baseline with given times and work for rows of masks A and B."""
    rows = [dataclasses.asdict(Row(SHAPE, name, "peer", MASK.work())) for name in "AB"]
    path = folder / "problem.npz"
    names = "build", "forward", "backward", "tiles", "bars"
    np.savez(path, rows=json.dumps(rows[: len(values)]), names=names, values=np.array(values))
    return "peer", workers.command("tests.benchmarks.kernels.fake_torch", str(path))


def test_a_peer_fills_in_the_times_of_its_rows(tmp_path):
    times = 0.5, 1.0, 2.5, MASK.work().tiles, MASK.work().bars
    sent, logged = ran(fake(tmp_path, times, times))
    assert logged == ["peer: torch 9, Triton 8"]
    assert [(row["mask"], row["build"], row["forward"], row["total"]) for row in sent] == [
        ("A", 0.5, 1.0, 3.5),
        ("B", 0.5, 1.0, 3.5),
    ]
    assert sent[0]["work"] == {"tiles": 10, "bars": 6} and sent[0].keys() <= {
        field.name for field in dataclasses.fields(Row)
    }


def test_a_peer_that_does_other_work_is_named(tmp_path, capfd):
    sent, logged = ran(fake(tmp_path, (0.5, 1.0, 2.5, 9, 6)))
    assert sent == [] and logged[1:] == ["FAILED to measure: peer"]
    assert "peer on mask A executes {'tiles': 9.0, 'bars': 6.0}" in capfd.readouterr().err


def test_workers_say_what_they_miss(tmp_path):
    """Three workers at once: each needs torch and a GPU."""
    if Path("/dev/nvidiactl").exists() and importlib.util.find_spec("torch"):
        pytest.skip("torch may run here")
    peers = Peers(sys.executable, tmp_path, seed=0, repeats=1)
    sent, logged = ran(
        peers.flex(SHAPE, np.ones((2, 4, 4), bool)),
        peers.flash([SHAPE]),
        peers.mtraining(Path("nowhere"), [(SHAPE, "A")], [MASK]),
    )
    assert sent == []
    for text, who in zip(logged, ("FlexAttention", "torch flash", "reference"), strict=True):
        assert text.startswith(f"no {who} (") and "torch" in text


def test_problems_are_written_for_the_reference(tmp_path):
    peers = Peers(sys.executable, tmp_path, seed=3, repeats=1)
    peers.mtraining(Path("nowhere"), [(SHAPE, "A")], [MASK])
    with np.load(tmp_path / "mtraining.npz") as file:
        assert file["shapes"].tolist() == [[512, 2, 1, 64]] and file["seed"] == 3
        assert file["diagonals_0"].tolist() == [[0, 2], [0, -1]]
        (row,) = json.loads(str(file["rows"]))
    assert (row["mask"], row["who"], row["work"]) == ("A", "reference", {"tiles": 10, "bars": 6})
    assert padded((np.zeros(0, int),) * 2).shape == (2, 0)
    assert MASK.work() == Work(tiles=10, bars=6)
