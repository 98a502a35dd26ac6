"""What a soaked run should have left: its losses, its files, and memory that does not grow."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# What belongs into the folder of a run.
_FILES = {"checkpoints", "metrics.jsonl"}
# What must be equal to the bit; the last ones are there in audited steps only.
_COMPARED = ("loss", "grad_norm", "density", "recall", "output_error", "local_gradient_cosine")
# Memory goes up and down within a step. What stays is the least of a while.
_WHILES = 20


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, one for each step; none if it has not written any.

    Args:
        folder: of the run. Its last line may be half written.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def different_steps(
    expected: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]
) -> list[int]:
    """Steps of which loss, gradient norm, density or audit are not those expected, to the bit.

    Steps that are missing or there twice are among them.

    Args:
        expected, found: records in the order in which they were written.
    """
    ours, theirs = _by_step(expected), _by_step(found)
    return sorted(
        step for step in ours.keys() | theirs.keys() if ours.get(step) != theirs.get(step)
    )


def first_difference(
    expected: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]], step: int
) -> str:
    """What differs in a step of `different_steps`, in words."""
    ours, theirs = (_by_step(records).get(step, []) for records in (expected, found))
    if len(ours) != 1 or len(theirs) != 1:
        return f"step {step} was written {len(theirs)} times instead of {len(ours)}"
    return f"step {step}: " + ", ".join(
        f"{name} {b!r} instead of {a!r}"
        for name, a, b in zip(_COMPARED, ours[0], theirs[0], strict=True)
        if a != b
    )


def _by_step(records: Sequence[dict[str, Any]]) -> dict[int, list[tuple]]:
    steps: dict[int, list[tuple]] = {}
    for record in records:
        values = tuple(record.get(name) for name in _COMPARED)
        steps.setdefault(record["step"], []).append(values)
    return steps


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
    rest = np.array(samples[len(samples) // 3 :], np.float64).reshape(-1, 2)
    parts = [x for x in np.array_split(rest, _WHILES) if len(x)]
    least = np.array([x[x[:, 1].argmin()] for x in parts]).reshape(-1, 2)
    if len(least) < 2 or least[0, 0] == least[-1, 0]:
        return 0.0
    return float(np.polyfit(least[:, 0], least[:, 1], 1)[0])
