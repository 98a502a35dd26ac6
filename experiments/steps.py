"""What results keep of a run's steps: a line for each, or for each group of them in a long run."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from experiments import arms
from experiments.arms import Line

# Of a step's record, what the report reads.
KEPT = (
    "step", "loss", "grad_norm", "step_seconds", "density", "recall", "recall_worst",
    "tokens_per_second", "dense_step",
)  # fmt: skip
TIMES = ("step_seconds", "tokens_per_second")
# Lines of a run at most, about: more say nothing that a picture shows, and results are committed.
LINES = 400


def training_lines(folder: Path, about: Line, timed: bool = True) -> list[Line]:
    """Steps of a run, as the report needs them; of a step that ran twice the last time.

    A run of more than `LINES` steps has lines for groups of steps: means over the `steps` steps
    that end with `step`.

    Args:
        folder: of the run.
        about: begins each line.
        timed: False leaves times out, as of a run that shared its device.
    """
    steps = {x["step"]: x for x in arms.read_lines(folder / "metrics.jsonl") if "loss" in x}
    kept = [name for name in KEPT if timed or name not in TIMES]
    lines = [{name: x[name] for name in kept if name in x} for _, x in sorted(steps.items())]
    return [{"what": "train", **about, **line} for line in _grouped(lines)]


def _grouped(lines: list[Line]) -> list[Line]:
    size = -(-len(lines) // LINES)
    if size <= 1:
        return lines
    groups: list[list[Line]] = []
    for line in lines:
        last = groups[-1] if groups else []
        alike = last and last[-1].get("dense_step") == line.get("dense_step")
        # Groups end at multiples, so that a run which went on has the same ones.
        if alike and (line["step"] - 1) // size == (last[-1]["step"] - 1) // size:
            last.append(line)
        else:
            groups.append([line])
    return [_mean(group) for group in groups]


def _mean(group: Sequence[Line]) -> Line:
    found: Line = {"step": group[-1]["step"], "steps": len(group)}
    for name in KEPT[1:]:
        values = [x[name] for x in group if x.get(name) is not None]
        if values:
            found[name] = values[0] if name == "dense_step" else float(np.mean(values))
    return found


def count(lines: Iterable[Line]) -> int:
    """How many steps the lines of a run are of."""
    return sum(line.get("steps", 1) for line in lines)


def seconds(lines: Iterable[Line]) -> np.ndarray:
    """Seconds of all steps up to each line, fp64 [lines]; each line needs `step_seconds`."""
    return np.cumsum([line["step_seconds"] * line.get("steps", 1) for line in lines])
