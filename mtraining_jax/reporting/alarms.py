"""Warnings about heads with poor sparse attention."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mtraining_jax.config import Config
from mtraining_jax.reporting.audit import PER_HEAD, worst_head
from mtraining_jax.reporting.record import Record
from mtraining_jax.utils.errors import UserError

_GAP = 0.2
# By metric: the option with its limit, if any, when it is beyond that, and the sentence about the
# worst head.
_LIMITS = {
    "recall": ("alarm_recall", np.less, "has a recall of {:.1%}, less"),
    "local_gradient_cosine": (
        "alarm_gradient",
        np.less,
        "has a cosine of {:.3f} between its query gradients and those of dense attention, less",
    ),
    "index_gap": (
        None,
        np.greater,
        "has a recall {:.3f} higher for the last queries than for others, more",
    ),
}


class Alarms:
    """Checks the audits of a run against the limits `audit.alarm_...` and `_GAP`.

    Warns when a metric exceeds its limit in two audits in a row, since one audit samples few rows,
    and again only after it was within the limit. Deterministic across processes.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._in_a_row: dict[str, int] = {}

    def state(self) -> dict[str, int]:
        """JSON-serializable state: consecutive audits beyond the limit, by metric."""
        return dict(self._in_a_row)

    def go_to(self, state: Mapping[str, Any] | None) -> None:
        """Restores `state`, so that resuming neither loses nor repeats a warning; None resets."""
        try:
            self._in_a_row = {name: int(times) for name, times in (state or {}).items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError("the saved state of audit alarms is not readable") from error

    def of(self, record: Record) -> list[str]:
        """Warnings raised by this audit, each with the worst head and the option to change."""
        audit, sparsity = self._config.audit, self._config.sparsity
        more = less_local = sparsity.pattern.more_pairs()
        if sparsity.kind != "sampled_rows":
            less_local = 'sparsity.kind = "sampled_rows" probes queries of the entire sequence'
        sentences = []
        for name, (field, is_beyond, what) in _LIMITS.items():
            if name + PER_HEAD not in record:
                continue
            values = np.array(record[name + PER_HEAD], np.float64)
            limit = _GAP if field is None else getattr(audit, field)
            number = int(is_beyond(values, limit).sum())
            if not self._is_due(name, number > 0) or (at := worst_head(record, name)) is None:
                continue
            others = f" (as do {number - 1} of {values.size - 1} others)" if number > 1 else ""
            sentences.append(
                f"layer {at[0]} head {at[1]} {what.format(values[at])} than "
                f"{f'audit.{field} = ' if field else ''}{limit}{others}; "
                f"{less_local if name == 'index_gap' else more}"
            )
        return sentences

    def _is_due(self, name: str, beyond: bool) -> bool:
        self._in_a_row[name] = self._in_a_row.get(name, 0) + 1 if beyond else 0
        return self._in_a_row[name] == 2
