"""Bounded-memory statistics of the steps of a run, for its summary."""

import math
from collections import deque
from collections.abc import Iterable

from mtraining_jax.reporting.record import Record, density_of, held_out_text

KEPT = 1000
_MEANS = (
    "recall", "infeasible", "attention_imbalance", "step_imbalance",
    "attention_imbalance_predicted", "step_imbalance_predicted",
)  # fmt: skip


class History:
    """The newest records, and running statistics of all steps.

    Keeping all records would take gigabytes: they hold values per layer, and of audits per head.

    Attributes:
        count: number of steps.
        dense: number of dense steps of a sparse run.
        seconds: total time of the steps.
        first_loss: first finite loss, if any.
        finite: whether any step had a finite loss and gradient norm.
        held_out: first and last validation losses as text; empty without evaluation.
        last: the newest records, at most `KEPT`.
        losses: the newest finite losses, at most 10.
        finite_losses: number of steps with a finite loss.
        shares: minimum and maximum tuned mass fraction; infinite without tuning.
    """

    def __init__(self) -> None:
        self.count, self.dense, self.seconds = 0, 0, 0.0
        self.first_loss: float | None = None
        self.finite = False
        self.held_out: list[str] = []
        self.last: deque[Record] = deque(maxlen=KEPT)
        self.losses: deque[float] = deque(maxlen=10)
        self.finite_losses = 0
        self.shares = math.inf, -math.inf
        self._sums: dict[str, tuple[float, int]] = {}

    @classmethod
    def of(cls, records: Iterable[Record]) -> "History":
        """Builds the history of some records."""
        history = cls()
        for record in records:
            history.add(record)
        return history

    def add(self, record: Record) -> None:
        """Adds the record of the next step."""
        self.count += 1
        self.seconds += record["step_seconds"]
        self.last.append(record)
        if record["loss"] is not None:
            self.finite_losses += 1
            self.losses.append(record["loss"])
            if self.first_loss is None:
                self.first_loss = record["loss"]
            self.finite |= record["grad_norm"] is not None
        if (text := held_out_text(record)) is not None:
            self.held_out = [*self.held_out[:1], text]
        if record.get("dense_step"):
            self.dense += 1
        else:
            self._add("density", density_of(record))
        for name in _MEANS:
            self._add(name, record.get(name))
        if "tuned" in record:
            shares = record["tuned_by_group"]
            self.shares = min(self.shares[0], *shares), max(self.shares[1], *shares)
            self._add("tuned", sum(shares) / len(shares))

    def _add(self, name: str, value: float | None) -> None:
        if value is not None:
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + 1

    def mean(self, name: str) -> float | None:
        """Mean of a metric over the steps that have it, if any; "density" excludes dense steps."""
        total, count = self._sums.get(name, (0.0, 0))
        return total / count if count else None
