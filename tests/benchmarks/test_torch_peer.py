"""Peers in torch: what the parent asks of a child process, without torch."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import torch_peer
from benchmarks.cases import Row, Shape
from benchmarks.masks import SlashMask, Work
from benchmarks.torch_peer import PeerError, TorchPeer

SHAPE = Shape(512, 2, 1, 64)
MASK = SlashMask(4, (np.array([0, 2]), np.array([0])), (np.array([5]), np.array([5, 300])))
# A child that answers as torch_child.py does: what the arrays told, one line for each.
CHILD = """
import sys
import numpy as np
lines = np.load(sys.argv[1])["lines"]
print(lines[0], flush=True)
sys.stdin.readline()
print(*lines[1:], sep="\\n", end="\\n" * (len(lines) > 1), flush=True)
"""


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """A function that starts a child which gives certain lines, for rows of masks A and B."""
    monkeypatch.setattr(torch_peer, "__file__", str(tmp_path / "torch_peer.py"))
    tmp_path.joinpath("child.py").write_text(CHILD)
    started = []

    def start(*lines):
        rows = [Row(SHAPE, name, "peer", MASK.work()) for name in "AB"]
        started.append(TorchPeer(sys.executable, "child.py", rows, lines=np.array(lines)))
        return started[-1]

    yield start
    for child in started:
        child.close()


def test_a_peer_fills_in_the_times_of_its_rows(peer):
    times = '{"build": 0.5, "forward": 1.0, "backward": 2.5, "tiles": %d, "bars": %d}'
    work = MASK.work()
    line = times % (work.tiles, work.bars)
    child = peer('{"ready": "torch 9"}', line, line)
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
def test_a_peer_that_fails_or_does_other_work_is_named(peer, line, reason):
    child = peer('{"ready": ""}', *([line] if line else []))
    assert child.ready[0]
    with pytest.raises(PeerError, match=reason):
        next(child.measure())


def test_children_say_what_they_miss():
    """Three children at once: each needs torch and a GPU."""
    if (Path("/dev/nvidiactl")).exists() and importlib.util.find_spec("torch"):
        pytest.skip("torch may run here")
    python, checkout = sys.executable, Path("nowhere")
    peers = [
        torch_peer.flex_peer(python, SHAPE, np.ones((2, 4, 4), bool), 0, 1),
        torch_peer.flash_peer(python, [SHAPE], 0, 1),
        torch_peer.reference_peer(python, checkout, [(SHAPE, "A")], [MASK], 0, 1),
    ]
    try:
        for peer, who in zip(peers, ("FlexAttention", "torch flash", "reference"), strict=True):
            running, text = peer.ready
            assert not running and text.startswith(f"no {who} (") and "torch" in text
    finally:
        for peer in peers:
            peer.close()


def test_masks_reach_the_reference_filled_up():
    assert torch_peer._filled(MASK.diagonals).tolist() == [[0, 2], [0, -1]]
    assert torch_peer._filled((np.zeros(0, int),) * 2).shape == (2, 0)
    assert MASK.work() == Work(tiles=10, bars=6)
