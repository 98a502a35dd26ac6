"""Reads and writes result files: JSON lines, with the values that rows share written once.

A line is one of three things:

- an object with "columns": a header. Its other fields hold for all rows below it.
- a list: a row with the values of these columns; `null` and missing values at the end are absent.
- an object without "columns", such as the description of a run.

Readers get a dict for each row.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import result_file
from mtraining_jax.utils.errors import UserError

Line = dict[str, Any]

# Fields that differ from row to row, with their digits after the decimal point, by kind of row.
# Fields that are often missing come last.
COLUMNS = {
    "train": {
        "step": 0, "steps": 0, "loss": 5, "density": 5, "step_seconds": 5, "recall": 5,
        "recall_worst": 4, "dense_step": 0,
    },
    "loss": {
        "number": 0, "kind": 0, "density": 5, "loss_of_last": 5, "loss_by_position": 5,
        "loss_of_copies": 5,
    },
    "task": {"number": 0, "depth": 3, "score": 6, "density": 5, "loss": 4},
}  # fmt: skip
# Fields of a step's metrics that the report reads; "steps" is added to groups.
STEP_FIELDS = tuple(name for name in COLUMNS["train"] if name != "steps")
# Approximate number of training records of a run, as results are committed.
TRAINING_LINES = 400


def read_lines(path: Path) -> list[Line]:
    """Reads a JSONL file; a missing file has no lines. An incomplete last line is ignored.

    Raises:
        UserError: if another line is not JSON, or a row does not fit the header above it.
    """
    lines, header, columns = [], {}, ()
    for number, value in enumerate(result_file.read_lines(path), 1):
        if isinstance(value, dict):
            columns, header = value.pop("columns", ()), value
            lines += [] if columns else [value]
            continue
        if len(value) > len(columns):
            raise UserError(f"{path}, line {number} has more values than columns: {len(columns)}")
        row = zip(columns, value, strict=False)
        lines.append(header | {name: x for name, x in row if x is not None})
    return lines


def append_lines(path: Path, lines: Iterable[Line]) -> None:
    """Adds lines to a JSONL file; an incomplete last line is removed first."""
    objects = [x for x in result_file.read_lines(path) if isinstance(x, dict)]
    result_file.append_lines(path, _values(lines, objects[-1] if objects else {}))


def _values(lines: Iterable[Line], header: Line) -> Iterator[Any]:
    """The values of lines; a header is omitted if it is the last object in the file."""
    for shared, same in itertools.groupby(lines, _shared):
        rows, decimals = list(same), COLUMNS.get(shared.get("what"), {})
        columns = [name for name in decimals if any(name in row for row in rows)]
        if not columns:
            yield from rows
            header = {}
            continue
        new = shared | {"columns": columns}
        if new != header:
            yield new
        header = new
        for row in rows:
            values = [_rounded(row.get(name), decimals[name]) for name in columns]
            while values and values[-1] is None:
                values.pop()
            yield values


def _shared(line: Line) -> Line:
    """The fields of a line that belong into its header."""
    columns = COLUMNS.get(line.get("what"), ())
    shared = {name: x for name, x in line.items() if name not in columns}
    return {"what": shared.pop("what"), **shared} if columns else shared


def _rounded(value: Any, decimals: int) -> Any:
    if isinstance(value, list):
        return [_rounded(x, decimals) for x in value]
    if not isinstance(value, float):
        return value
    short = round(value, decimals)
    return int(short) if short.is_integer() else short


def training_lines(folder: Path, about: Line) -> list[Line]:
    """Training records of a run. Of a step that ran twice, the last record counts.

    Each record starts with the fields `about`. A run of more than `TRAINING_LINES` steps is reduced
    to groups: means over the `steps` steps that end with `step`.
    """
    steps = {x["step"]: x for x in read_lines(folder / "metrics.jsonl") if "loss" in x}
    lines = [{name: x[name] for name in STEP_FIELDS if name in x} for _, x in sorted(steps.items())]
    return [{"what": "train", **about, **line} for line in _grouped(lines)]


def _grouped(lines: list[Line]) -> list[Line]:
    size = -(-len(lines) // TRAINING_LINES)
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
    for name in STEP_FIELDS[1:]:
        values = [x[name] for x in group if x.get(name) is not None]
        if values:
            found[name] = values[0] if name == "dense_step" else float(np.mean(values))
    return found


def count_steps(lines: Iterable[Line]) -> int:
    """Total number of steps in the records of a run."""
    return sum(line.get("steps", 1) for line in lines)
