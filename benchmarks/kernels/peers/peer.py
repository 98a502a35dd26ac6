"""Baselines in torch: the parent's side of the child processes of `child.py`."""

import functools
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernels.cases import Row, Shape
from benchmarks.kernels.masks import SlashMask, Work
from benchmarks.workers import ROOT


class PeerError(RuntimeError):
    """A child process that failed or computed other work than its rows state."""


class TorchPeer:
    """A child process that compiles at once, and measures when the parent says so.

    Args:
        python: a Python that has torch.
        module: what the child runs.
        rows: what it measures; times are filled in.
        arrays: its inputs.
    """

    def __init__(self, python: str, module: str, rows: Sequence[Row], **arrays: Any):
        self.who, self._rows = rows[0].who, rows
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name, "problem.npz")
        np.savez(path, **arrays)
        self._child = subprocess.Popen(
            [python, "-m", module, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    @functools.cached_property
    def ready(self) -> tuple[bool, str]:
        """Waits until it has compiled; (True, versions) or (False, why it cannot run)."""
        answer = self._read()
        if "ready" in answer:
            return True, f"{self.who}: {answer['ready']}"
        return False, f"no {self.who} ({answer.get('missing', 'the child process failed')})"

    def measure(self) -> Iterator[Row]:
        """Times every row; nothing else may use the device meanwhile.

        Raises:
            PeerError: if a row fails, or executes other work than stated.
        """
        self._child.stdin.write("go\n")
        self._child.stdin.flush()
        for row in self._rows:
            values = self._read()
            name = f"{self.who} on mask {row.mask} at S = {row.shape.seq_len}"
            if "forward" not in values:
                raise PeerError(f"{name}: {values.get('failed', 'the child process failed')}")
            if "tiles" in values:
                done = Work(values.pop("tiles"), values.pop("bars"))
                if done != row.work:
                    raise PeerError(f"{name} executes {done} instead of {row.work}")
            for key, value in values.items():
                setattr(row, key, value)
            row.total = row.forward + row.backward
            yield row

    def close(self) -> None:
        """Ends the child process."""
        self._child.kill()
        self._child.communicate()
        self._folder.cleanup()

    def _read(self) -> dict:
        line = self._child.stdout.readline()
        return json.loads(line) if line else {}


def flex_peer(python: str, shape: Shape, mask: np.ndarray, seed: int, repeats: int) -> TorchPeer:
    """FlexAttention on a causal block mask, bool [heads, S/128, S/128]."""
    row = Row(shape, "F", "FlexAttention", Work(int(mask.sum())))
    return TorchPeer(
        python,
        f"{__package__}.flex",
        [row],
        mask=np.packbits(mask),
        seq_len=shape.seq_len,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        dim=shape.dim,
        seed=seed,
        repeats=repeats,
    )


def flash_peer(python: str, shapes: Sequence[Shape], seed: int, repeats: int) -> TorchPeer:
    """The dense causal flash attention of torch."""
    rows = [Row(shape, "D", "torch flash") for shape in shapes]
    return TorchPeer(
        python, f"{__package__}.flash", rows, shapes=_sizes(shapes), seed=seed, repeats=repeats
    )


def reference_peer(
    python: str,
    checkout: Path,
    problems: Sequence[tuple[Shape, str]],
    masks: Sequence[SlashMask],
    seed: int,
    repeats: int,
) -> TorchPeer:
    """The Triton kernels of MTraining's authors, on shapes with the name of a mask and the mask."""
    arrays = {}
    for n, mask in enumerate(masks):
        arrays[f"diagonals_{n}"] = _padded(mask.diagonals)
        arrays[f"verticals_{n}"] = _padded(mask.verticals)
    rows = [
        Row(*problem, "reference", mask.work())
        for problem, mask in zip(problems, masks, strict=True)
    ]
    return TorchPeer(
        python,
        f"{__package__}.mtraining",
        rows,
        shapes=_sizes([shape for shape, _ in problems]),
        reference=str(checkout.resolve()),
        seed=seed,
        repeats=repeats,
        **arrays,
    )


def _sizes(shapes: Sequence[Shape]) -> np.ndarray:
    return np.array([(x.seq_len, x.heads, x.kv_heads, x.dim) for x in shapes])


def _padded(lists: Sequence[np.ndarray]) -> np.ndarray:
    """One array [heads, longest], padded with -1."""
    padded = np.full((len(lists), max(map(len, lists))), -1)
    for head, values in enumerate(lists):
        padded[head, : len(values)] = values
    return padded
