"""Peers in torch: what the parent asks of a child process, without torch."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.kernels.cases import Row, Shape
from benchmarks.kernels.masks import SlashMask, Work
from benchmarks.kernels.peers.peer import (
    PeerError,
    TorchPeer,
    _padded,
    flash_peer,
    flex_peer,
    reference_peer,
)

SHAPE = Shape(512, 2, 1, 64)
MASK = SlashMask(4, (np.array([0, 2]), np.array([0])), (np.array([5]), np.array([5, 300])))


@pytest.fixture
def scripted():
    """A function that starts a child with given answers, for rows of masks A and B."""
    started = []

    def start(*lines):
        rows = [Row(SHAPE, name, "peer", MASK.work()) for name in "AB"]
        module = "tests.benchmarks.kernels.scripted_child"
        started.append(TorchPeer(sys.executable, module, rows, lines=np.array(lines)))
        return started[-1]

    yield start
    for child in started:
        child.close()


def test_a_peer_fills_in_the_times_of_its_rows(scripted):
    times = '{"build": 0.5, "forward": 1.0, "backward": 2.5, "tiles": %d, "bars": %d}'
    work = MASK.work()
    line = times % (work.tiles, work.bars)
    child = scripted('{"ready": "torch 9"}', line, line)
    assert child.ready == (True, "peer: torch 9")
    rows = list(child.measure())
    assert [(row.mask, row.build, row.forward, row.total) for row in rows] == [
        ("A", 0.5, 1.0, 3.5), ("B", 0.5, 1.0, 3.5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"failed": "out of memory"}', "peer on mask A at S = 512: out of memory"),
        ("", "peer on mask A at S = 512: the child process failed"),
        ('{"forward": 1.0, "backward": 2.0, "tiles": 9, "bars": 6}',
         r"executes Work\(tiles=9, bars=6\) instead of Work\(tiles=10"),
    ],
)  # fmt: skip
def test_a_peer_that_fails_or_does_other_work_is_named(scripted, line, reason):
    child = scripted('{"ready": ""}', *([line] if line else []))
    assert child.ready[0]
    with pytest.raises(PeerError, match=reason):
        next(child.measure())


def test_children_say_what_they_miss():
    """Three children at once: each needs torch and a GPU."""
    if (Path("/dev/nvidiactl")).exists() and importlib.util.find_spec("torch"):
        pytest.skip("torch may run here")
    python, checkout = sys.executable, Path("nowhere")
    peers = [
        flex_peer(python, SHAPE, np.ones((2, 4, 4), bool), 0, 1),
        flash_peer(python, [SHAPE], 0, 1),
        reference_peer(python, checkout, [(SHAPE, "A")], [MASK], 0, 1),
    ]
    try:
        for peer, who in zip(peers, ("FlexAttention", "torch flash", "reference"), strict=True):
            running, text = peer.ready
            assert not running and text.startswith(f"no {who} (") and "torch" in text
    finally:
        for peer in peers:
            peer.close()


def test_masks_reach_the_reference_padded():
    assert _padded(MASK.diagonals).tolist() == [[0, 2], [0, -1]]
    assert _padded((np.zeros(0, int),) * 2).shape == (2, 0)
    assert MASK.work() == Work(tiles=10, bars=6)
