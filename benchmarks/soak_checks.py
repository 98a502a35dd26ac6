"""What a soaked run should have left: its losses, its files, and memory that does not grow."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# What belongs into the folder of a run.
_FILES = {"checkpoints", "metrics.jsonl"}


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, one for each step."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def different_losses(
    expected: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]
) -> list[int]:
    """Steps whose loss or gradient norm are not those expected, to the bit, or that are not there.

    Args:
        expected, found: records in the order in which they were written.
    """
    theirs: dict[int, list[tuple]] = {}
    for record in found:
        theirs.setdefault(record["step"], []).append((record["loss"], record["grad_norm"]))
    ours = {record["step"]: [(record["loss"], record["grad_norm"])] for record in expected}
    return sorted(
        step for step in ours.keys() | theirs.keys() if ours.get(step) != theirs.get(step)
    )


def left_behind(folder: Path, names: Collection[str]) -> list[str]:
    """What lies in the folder of all runs and should not.

    Args:
        folder: of the runs.
        names: of the runs.
    """
    wrong = [path for path in folder.iterdir() if path.name not in names]
    for name in names:
        wrong += [path for path in (folder / name).iterdir() if path.name not in _FILES]
        steps = list((folder / name / "checkpoints").iterdir())
        wrong += [path for path in steps if not path.name.isdecimal()]
        wrong += sorted(steps)[: max(0, len(steps) - 2)] if len(steps) > 2 else []
    return sorted(str(path.relative_to(folder)) for path in wrong)


def per_step(samples: Sequence[tuple[int, int]]) -> float:
    """Slope of memory over steps in bytes, by least squares, without the first third.

    Args:
        samples: step and bytes, in order.
    """
    rest = np.array(samples[len(samples) // 3 :], np.float64)
    if len(rest) < 2 or rest[0, 0] == rest[-1, 0]:
        return 0.0
    return float(np.polyfit(rest[:, 0], rest[:, 1], 1)[0])
