"""What is remembered of the steps of a run: enough for its summary, however many there were."""

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
    """The last records, and of all steps what takes no more memory with each.

    A record holds numbers of each layer, and an audit's of each head: some thousand steps of a
    large model would take gigabytes.

    Attributes:
        count: steps so far.
        dense: those of them that computed all pairs though the run is sparse.
        seconds: that they took.
        first_loss: of the first step whose loss was finite; None if there was none.
        finite: whether any step had a finite loss and gradient norm.
        held_out: the first and the last text of held-out losses; empty without any.
        last: the newest records, at most `KEPT`.
        losses: the newest finite ones, at most 10.
        finite_losses: how many steps had one.
        shares: the smallest and the largest share of mass that a group kept; none was tuned where
            the smallest is infinite.
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
        """The history of these steps."""
        history = cls()
        for record in records:
            history.add(record)
        return history

    def add(self, record: Record) -> None:
        """Takes the record of the next step."""
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
        """The mean of "density" or another number over the steps that have it; None without.

        That of "density" leaves out the dense steps of a sparse run.
        """
        total, count = self._sums.get(name, (0.0, 0))
        return total / count if count else None
