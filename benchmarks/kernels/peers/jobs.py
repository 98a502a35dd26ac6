"""Baselines in torch as workers of the attention benchmark; they read their problem from a file."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernels.cases import Row, Shape
from benchmarks.kernels.masks import SlashMask, Work
from benchmarks.workers import Job, command


@dataclasses.dataclass(frozen=True)
class Peers:
    """What all baselines share.

    Attributes:
        python: a Python that has torch.
        folder: for files of problems.
        seed: of inputs.
        repeats: runs per median.
    """

    python: str
    folder: Path
    seed: int
    repeats: int

    def flex(self, shape: Shape, mask: np.ndarray) -> Job:
        """FlexAttention on a causal block mask, bool [heads, S/128, S/128]."""
        row = Row(shape, "F", "FlexAttention", Work(int(mask.sum())))
        return self._job("flex", [row], mask=np.packbits(mask))

    def flash(self, shapes: Sequence[Shape]) -> Job:
        """The dense causal flash attention of torch."""
        return self._job("flash", [Row(shape, "D", "torch flash") for shape in shapes])

    def mtraining(
        self, checkout: Path, problems: Sequence[tuple[Shape, str]], masks: Sequence[SlashMask]
    ) -> Job:
        """The Triton kernels of MTraining's authors, on shapes and named masks."""
        arrays = {}
        for n, mask in enumerate(masks):
            arrays[f"diagonals_{n}"] = padded(mask.diagonals)
            arrays[f"verticals_{n}"] = padded(mask.verticals)
        rows = [
            Row(*problem, "reference", mask.work())
            for problem, mask in zip(problems, masks, strict=True)
        ]
        return self._job("mtraining", rows, reference=str(checkout.resolve()), **arrays)

    def _job(self, module: str, rows: Sequence[Row], **arrays: Any) -> Job:
        path = self.folder / f"{module}.npz"
        shapes = np.array([dataclasses.astuple(row.shape) for row in rows])
        values = json.dumps([dataclasses.asdict(row) for row in rows])
        np.savez(path, rows=values, shapes=shapes, seed=self.seed, repeats=self.repeats, **arrays)
        return rows[0].who, command(f"{__package__}.{module}", str(path), python=self.python)


def padded(lists: Sequence[np.ndarray]) -> np.ndarray:
    """One array [heads, longest], padded with -1."""
    found = np.full((len(lists), max(map(len, lists))), -1)
    for head, values in enumerate(lists):
        found[head, : len(values)] = values
    return found
