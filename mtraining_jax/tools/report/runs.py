"""Reads run folders for their page."""

import contextlib
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtraining_jax.data.files import errors_as
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.file_limits import MIB, absence, read_text

# Lists of records that are read. With all values per layer and head, a long run takes gigabytes.
_LISTS = (
    "alarms", "density_per_layer", "recall_per_head", "eval_loss_by_position",
    "eval_loss_dense_by_position",
)  # fmt: skip
# Larger values are damaged, or not finite; charts cannot have them.
_LARGEST_INT, _LARGEST = 2**53, 1e100
_WORK = {
    "data": "waiting for data",
    "compile": "compilation",
    "eval": "evaluation",
    "checkpoint": "checkpoints",
}


class Run(NamedTuple):
    """A run; `records` are those of metrics.jsonl, see `_kept`."""

    name: str
    folder: Path
    records: list[dict[str, Any]]

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric that a chart can have, bytes in GiB.

        Of NAME_by_position the numbers of buckets, and the last values.
        """
        if name.endswith("_by_position"):
            _, values = self.grid(name)
            last = values[-1] if values.ndim == 2 else np.zeros(0)
            return np.arange(last.size), last
        pairs = [(x["step"], x[name]) for x in self.records if isinstance(x.get(name), int | float)]
        steps, values = np.array(pairs, float).reshape(-1, 2).T
        values = values / 2**30 if "_bytes_" in name else values
        shown = np.abs(values) < _LARGEST
        return steps[shown], values[shown]

    def grid(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric that is a list: [steps, layers, ...]."""
        steps, rows = [], []
        for record in self.records:
            with contextlib.suppress(KeyError, TypeError, ValueError):
                row = np.array(record[name], float)
                row[np.abs(row) >= _LARGEST] = np.nan
                if row.ndim and (not rows or row.shape == rows[0].shape):
                    steps.append(record["step"])
                    rows.append(row)
        return np.array(steps, float), np.array(rows)

    def seconds(self) -> dict[str, float]:
        """Recorded seconds by kind of work."""
        seconds = defaultdict[str, float](float)
        for record in self.records:
            audited = "audited steps" if "recall_per_head" in record else "steps"
            kinds = _WORK | {"step": "dense steps" if record.get("dense_step") else audited}
            for name, value in record.items():
                if (
                    name.endswith("_seconds")
                    and isinstance(value, int | float)
                    and 0 <= value < _LARGEST
                ):
                    kind = name.removesuffix("_seconds")
                    seconds[kinds.get(kind, kind)] += value
                    if kind == "data":  # a part of the step
                        seconds[kinds["step"]] -= value
        return seconds

    def texts(self) -> dict[str, str]:
        """The run's configuration and newest samples, by path."""
        found = {}
        for path in (self.folder / "config.toml", *sorted(self.folder.glob("samples/*.txt"))[-5:]):
            with contextlib.suppress(OSError, UserError, ValueError):
                found[path.relative_to(self.folder).as_posix()] = read_text(path, MIB)
        return found


def read_run(folder: Path, name: str) -> Run:
    """Reads a run folder; skips invalid lines, such as the last one of a killed run.

    Raises:
        UserError: if it has no metrics.
    """
    path, records = folder / "metrics.jsonl", []
    if not path.is_file():
        why = absence(path) or "is a folder"
        raise UserError(f"{path} {why}; name a run folder that has it, e.g. runs/tiny")
    with (
        errors_as(UserError, f"{path} cannot be read", OSError),
        path.open(encoding="utf-8", errors="replace") as file,
    ):
        for line in file:
            with contextlib.suppress(KeyError, RecursionError, TypeError, ValueError):
                record = json.loads(line, parse_int=_number)
                if isinstance(record["step"], int):
                    records.append(_kept(record))
    if not records:
        raise UserError(f"{path} has no steps; the first finished step writes its first line")
    return Run(name, folder, records)


def _number(text: str) -> int | float:
    """An integer of JSON; infinity if it is too large for charts."""
    number = int(text) if len(text) < 20 else math.inf
    return number if abs(number) < _LARGEST_INT else math.inf


def _kept(record: dict[str, Any]) -> dict[str, Any]:
    """What a page shows; densities are those of sparse steps, and may be replayed."""
    kept = {}
    for name, value in record.items():
        name = name.removeprefix("replayed_")
        density_of_dense_step = record.get("dense_step") and name.startswith("density")
        if (name in _LISTS) == isinstance(value, list) and not density_of_dense_step:
            kept[name] = value
    return kept
