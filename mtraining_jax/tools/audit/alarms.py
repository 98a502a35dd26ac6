"""Warnings about heads with poor sparse attention."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from mtraining_jax.callbacks import Callback, Record
from mtraining_jax.config import Config
from mtraining_jax.reporting.audit import PER_HEAD, audit_record, worst_head
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


class Alarms(Callback):
    """Reports audits, and checks them against the limits `audit.alarm_...` and `_GAP`.

    Warns when a metric exceeds its limit in two audits in a row, since one audit samples few rows,
    and again only after it was within the limit. Deterministic across processes.
    """

    key = "audit.alarms"

    def __init__(self, config: Config) -> None:
        self._config = config
        self._in_a_row: dict[str, int] = {}

    def save(self) -> dict[str, int]:
        """Consecutive audits beyond the limit, by metric, so that resuming repeats no warning."""
        return dict(self._in_a_row)

    def restore(self, step: int, saved: Mapping[str, Any] | None) -> None:
        del step
        try:
            self._in_a_row = {name: int(times) for name, times in (saved or {}).items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError("the saved state of audit alarms is not readable") from error

    def measured(self, metrics: MutableMapping[str, Any]) -> Record:
        return audit_record(metrics["audit"]) if "audit" in metrics else {}

    def step(self, record: Record) -> Record:
        audited = any(name + PER_HEAD in record for name in _LIMITS)
        return {"alarms": self._sentences(record)} if audited else {}

    def _sentences(self, record: Record) -> list[str]:
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
