"""Bounded-memory statistics of the steps of a run, for its summary."""

import math
from collections import defaultdict, deque
from collections.abc import Iterable

from mtraining_jax.callbacks import Callback, Record
from mtraining_jax.reporting.record import density_of, validation_text

LOWEST_DENSITY = "lowest_density"  # of all steps; in checkpoints
KEPT = 1000  # all records, with values per layer and head, would take gigabytes
_MEANS = (
    "recall", "infeasible", "attention_imbalance", "step_imbalance",
    "attention_imbalance_predicted", "step_imbalance_predicted",
)  # fmt: skip


class History(Callback):
    """The newest records, and running statistics of all steps."""

    key = LOWEST_DENSITY

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.count, self.seconds = 0, 0.0  # of all steps
        self.dense = 0  # dense steps of a sparse run
        self.lowest_density = 1.0
        self.finite = False  # whether any step had a finite loss and gradient norm
        self.first_loss: float | None = None  # finite, as all of these losses
        self.losses: deque[float] = deque(maxlen=10)
        self.finite_losses = 0
        self.validation: list[str] = []  # first and last losses as text
        self.last: deque[Record] = deque(maxlen=KEPT)
        self.fractions = math.inf, -math.inf  # smallest and largest tuned mass fraction
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, int] = defaultdict(int)
        for record in records:
            self.step(record)

    def restore(self, step: int, saved: float | None) -> None:
        del step
        self.lowest_density = 0.0 if saved is None else saved  # unknown in older checkpoints

    def save(self) -> float:
        return self.lowest_density

    def step(self, record: Record) -> None:
        self.count += 1
        self.seconds += record["step_seconds"]
        self.last.append(record)
        if record["loss"] is not None:
            self.finite_losses += 1
            self.losses.append(record["loss"])
            if self.first_loss is None:
                self.first_loss = record["loss"]
            self.finite |= record["grad_norm"] is not None
        self.initial(record)
        values = {name: record.get(name) for name in _MEANS}
        if (density := density_of(record)) is not None:
            self.lowest_density = min(self.lowest_density, density)
        if record.get("dense_step"):
            self.dense += 1
        else:
            values["density"] = density
        if "tuned" in record:
            fractions = record["tuned_by_group"]
            low, high = self.fractions
            self.fractions = min(low, *fractions), max(high, *fractions)
            values["tuned"] = sum(fractions) / len(fractions)
        for name, value in values.items():
            if value is not None:
                self._sums[name] += value
                self._counts[name] += 1

    def initial(self, record: Record) -> None:
        """Keeps the validation loss of a record, if it has one."""
        if (text := validation_text(record)) is not None:
            self.validation = [*self.validation[:1], text]

    def mean(self, name: str) -> float | None:
        """Mean of a metric over the steps that have it, if any; "density" excludes dense steps."""
        return self._sums[name] / self._counts[name] if name in self._counts else None
