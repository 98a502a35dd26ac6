"""Means of scores and losses, with their errors and counts."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import numpy as np

from mtraining_jax.tools.evaluate.results import Line

# Label of a model, and the attention at inference.
Run = tuple[str, str]


class Mean(NamedTuple):
    """A mean over samples, with the standard error from their spread (NaN for a single one)."""

    value: float
    error: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        return cls(float(np.mean(values)), spread / math.sqrt(len(values)), len(values))


class Lines:
    """The lines of a folder; models, attentions and tasks (with a score) as they appear."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._all = lines = list(lines)
        self.scored = [line for line in lines if "score" in line]
        self._losses = [line for line in lines if "loss_by_position" in line]
        self.models = list(dict.fromkeys(line["model"] for line in lines))
        self.attentions = list(dict.fromkeys(line["attention"] for line in lines))
        self.runs: list[Run] = list(itertools.product(self.models, self.attentions))
        self.tasks = list(dict.fromkeys(line["task"] for line in self.scored))
        self.lengths = sorted({line["length"] for line in self.scored})
        self.document_lengths = sorted({line["length"] for line in self._losses})
        self._by_cell: dict[tuple, dict[int, Line]] = defaultdict(dict)
        for line in self.scored:
            cell = (line["model"], line["attention"]), line["task"], line["length"]
            self._by_cell[cell][line["number"]] = line

    def cell(self, run: Run, task: str, length: int) -> dict[int, Line]:
        """Returns the lines of a task and length by sample number; may be empty."""
        return self._by_cell.get((run, task, length), {})

    def asked(self, run: Run, length: int) -> list[Line]:
        """Returns all lines of a length, with and without a score; may be empty."""
        return [x for x in self._all if (x["model"], x["attention"], x["length"]) == (*run, length)]

    def score(self, run: Run, task: str, length: int) -> Mean | None:
        lines = self.cell(run, task, length)
        return Mean.of([line["score"] for line in lines.values()]) if lines else None

    def mean_of_tasks(self, run: Run, tasks: Sequence[str], length: int) -> Mean | None:
        """Returns the plain mean over (independent) tasks; None if one is missing."""
        means = [mean for task in tasks if (mean := self.score(run, task, length)) is not None]
        if not means or len(means) < len(tasks):
            return None
        error = math.sqrt(sum(mean.error**2 for mean in means)) / len(means)
        return Mean(float(np.mean([mean.value for mean in means])), error, len(means))

    def difference(self, first: Run, second: Run, task: str, length: int) -> Mean | None:
        """Returns the mean of the first run's score minus the second's on the same prompts."""
        lines, others = self.cell(first, task, length), self.cell(second, task, length)
        # Models with other tokenizers have other prompts of a length.
        both = [
            (line, others[n])
            for n, line in sorted(lines.items())
            if n in others and others[n]["prompt_hash"] == line["prompt_hash"]
        ]
        return Mean.of([line["score"] - other["score"] for line, other in both]) if both else None

    def losses(self, run: Run, length: int) -> dict[tuple[str, int], list[float]]:
        """Returns by document the mean loss per position bucket, and that of the last tokens."""
        return {
            (line["task"], line["number"]): [*line["loss_by_position"], line["loss_of_last"]]
            for line in self._losses
            if (line["model"], line["attention"], line["length"]) == (*run, length)
        }
