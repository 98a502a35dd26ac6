"""Baselines in torch: what their workers send, without torch."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import workers
from benchmarks.kernels import peers
from benchmarks.kernels.masks import Work
from benchmarks.kernels.rows import Row, Shape

SHAPE = Shape(512, 2, 1, 64)


def test_a_worker_compiles_first_and_then_sends_a_row_per_problem(monkeypatch):
    calls, sent = [], []

    def fake(torch, peer, shape, mask, repeats):
        calls.append((mask, repeats))
        return {"build": 0.5, "forward": 1.0, "backward": 2.5, "work": Work(10, 6)}

    def my_turn(about):
        calls.append(about)
        return True

    cuda = SimpleNamespace(is_available=lambda: True, empty_cache=lambda: None)
    torch = SimpleNamespace(__version__="9", cuda=cuda, manual_seed=lambda seed: None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(peers.PEERS, "fake", fake)
    monkeypatch.setattr(workers, "my_turn", my_turn)
    monkeypatch.setattr(workers, "send", lambda value: sent.append(json.dumps(value)))
    _, command = peers.Peer("fake", 0, 3, [(SHAPE, "A"), (SHAPE, "B")]).job("python")
    peers.main(command[-1])
    assert calls == [("A", 1), ("B", 1), "torch 9", ("A", 3), ("B", 3)]
    rows = [Row.from_json(json.loads(text)) for text in sent]
    assert [(row.mask, row.who, row.build, row.total) for row in rows] == [
        ("A", "fake", 0.5, 3.5), ("B", "fake", 0.5, 3.5),
    ]  # fmt: skip
    assert rows[0].work == Work(10, 6) and rows[0].shape == SHAPE


def test_workers_say_what_they_miss():
    """Three workers at once: each needs torch and a GPU."""
    if Path("/dev/nvidiactl").exists() and importlib.util.find_spec("torch"):
        pytest.skip("torch may run here")
    logged = []
    jobs = [peers.Peer(name, 0, 1, [(SHAPE, "D")]).job(sys.executable) for name in peers.PEERS]
    workers.measure(jobs, len(jobs), pytest.fail, logged.append)
    for text, who in zip(logged, peers.PEERS, strict=True):
        assert text.startswith(f"no {who} (") and "torch" in text


def test_a_missing_checkout_is_named(tmp_path):
    with pytest.raises(peers.MissingError, match="pit_sparse_flash_attention_v3.py does not exist"):
        peers.reference_kernels(tmp_path)
