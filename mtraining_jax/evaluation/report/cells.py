"""Means of scores and losses, with their errors and counts."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Line = dict[str, Any]


@dataclass(frozen=True)
class Mean:
    """A mean over samples."""

    value: float
    error: float  # standard error, from the spread of the samples; NaN for a single one
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        return cls(float(np.mean(values)), spread / math.sqrt(len(values)), len(values))


class Lines:
    """The lines of a folder, indexed by model, attention, task and length.

    Attributes:
        models, attentions, tasks: in order of appearance; `tasks` only with a score.
        lengths: ascending.
        losses: lines of documents.
    """

    def __init__(self, lines: Iterable[Line]) -> None:
        lines = list(lines)
        self.scored = [line for line in lines if "score" in line]
        self.losses = [line for line in lines if "loss_by_position" in line]
        self.models = list(dict.fromkeys(line["model"] for line in lines))
        self.attentions = list(dict.fromkeys(line["attention"] for line in lines))
        self.tasks = list(dict.fromkeys(line["task"] for line in self.scored))
        self.lengths = sorted({line["length"] for line in self.scored})
        self._by_cell: dict[tuple, dict[int, Line]] = defaultdict(dict)
        for line in self.scored:
            cell = line["model"], line["attention"], line["task"], line["length"]
            self._by_cell[cell][line["number"]] = line

    def cell(self, model: str, attention: str, task: str, length: int) -> dict[int, Line]:
        """Returns the lines of a task and length by sample number; may be empty."""
        return self._by_cell.get((model, attention, task, length), {})

    def score(self, model: str, attention: str, task: str, length: int) -> Mean | None:
        lines = self.cell(model, attention, task, length)
        return Mean.of([line["score"] for line in lines.values()]) if lines else None

    def mean_of_tasks(
        self, model: str, attention: str, length: int, tasks: Sequence[str]
    ) -> Mean | None:
        """Returns the plain mean over tasks; None if one is missing.

        Its error assumes independent tasks, and its count is the number of tasks.
        """
        scores = [self.score(model, attention, task, length) for task in tasks]
        means = [mean for mean in scores if mean is not None]
        if not means or len(means) < len(scores):
            return None
        error = math.sqrt(sum(mean.error**2 for mean in means)) / len(means)
        return Mean(float(np.mean([mean.value for mean in means])), error, len(means))

    def difference(
        self, first: tuple[str, str], second: tuple[str, str], task: str, length: int
    ) -> Mean | None:
        """Returns the mean of the first score minus the second, each of a model and attention.

        Both answered the same prompts, so the error is that of the paired differences: smaller
        than the two errors would suggest.
        """
        lines, others = (self.cell(*each, task, length) for each in (first, second))
        both = lines.keys() & others.keys()
        if not both:
            return None
        return Mean.of([lines[n]["score"] - others[n]["score"] for n in sorted(both)])

    def densities(self, model: str, attention: str, length: int) -> list[float]:
        return [
            line["density"]
            for line in self.scored
            if (line["model"], line["attention"], line["length"]) == (model, attention, length)
            and line["density"] is not None
        ]

    def seconds(self, model: str, attention: str, length: int) -> list[float]:
        return [
            line["seconds"]
            for line in self.scored
            if (line["model"], line["attention"], line["length"]) == (model, attention, length)
        ]

    def losses_of_documents(
        self, model: str, attention: str, length: int
    ) -> dict[int, list[float]]:
        """Returns by document the mean loss per position bucket, and that of the last tokens.

        Every document has the same weight.
        """
        return {
            line["number"]: [*line["loss_by_position"], line["loss_of_last"]]
            for line in self.losses
            if (line["model"], line["attention"], line["length"]) == (model, attention, length)
        }

    @property
    def document_lengths(self) -> list[int]:
        return sorted({line["length"] for line in self.losses})
