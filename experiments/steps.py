"""Training records kept in the results: one for each step, or for each group of steps."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from experiments.result_lines import COLUMNS, Line, read_lines

# Fields of a step's metrics that the report reads; "steps" is added to groups.
KEPT = tuple(name for name in COLUMNS["train"] if name != "steps")
# Approximate number of records kept of a run, as results are committed.
LINES = 400


def training_lines(folder: Path, about: Line) -> list[Line]:
    """Training records of a run. Of a step that ran twice, the last record counts.

    Each record starts with the fields `about`. A run of more than `LINES` steps is reduced to
    groups: means over the `steps` steps that end with `step`.
    """
    steps = {x["step"]: x for x in read_lines(folder / "metrics.jsonl") if "loss" in x}
    lines = [{name: x[name] for name in KEPT if name in x} for _, x in sorted(steps.items())]
    return [{"what": "train", **about, **line} for line in _grouped(lines)]


def _grouped(lines: list[Line]) -> list[Line]:
    size = -(-len(lines) // LINES)
    if size <= 1:
        return lines
    groups: list[list[Line]] = []
    for line in lines:
        last = groups[-1] if groups else []
        alike = last and last[-1].get("dense_step") == line.get("dense_step")
        # Groups end at multiples of their size, so a resumed run has the same groups.
        if alike and (line["step"] - 1) // size == (last[-1]["step"] - 1) // size:
            last.append(line)
        else:
            groups.append([line])
    return [_mean(group) for group in groups]


def _mean(group: list[Line]) -> Line:
    found: Line = {"step": group[-1]["step"], "steps": len(group)}
    for name in KEPT[1:]:
        values = [x[name] for x in group if x.get(name) is not None]
        if values:
            found[name] = values[0] if name == "dense_step" else float(np.mean(values))
    return found


def count(lines: Iterable[Line]) -> int:
    """Total number of steps in the records of a run."""
    return sum(line.get("steps", 1) for line in lines)
