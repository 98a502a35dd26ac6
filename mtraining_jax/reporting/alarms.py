"""Warnings about heads with poor sparse attention."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mtraining_jax.config import Config
from mtraining_jax.reporting.audit import PER_HEAD, worst_head
from mtraining_jax.reporting.record import Record
from mtraining_jax.utils.errors import UserError


class Alarms:
    """Checks the audits of a run against the limits `audit.alarm_...`.

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
        more = less_local = sparsity.settings.more_pairs()
        if sparsity.kind != "sampled_rows":
            less_local = 'sparsity.kind = "sampled_rows" probes queries of the entire sequence'
        sentences = [
            self._of_heads(
                record,
                "recall",
                lambda recall: recall < audit.alarm_recall,
                f"has a recall of {{:.1%}}, less than audit.alarm_recall = {audit.alarm_recall}",
                more,
            ),
            self._of_heads(
                record,
                "local_gradient_cosine",
                lambda cosine: cosine < audit.alarm_gradient,
                "has a cosine of {:.3f} between its query gradients and those of dense attention, "
                f"less than audit.alarm_gradient = {audit.alarm_gradient}",
                more,
            ),
            self._of_heads(
                record,
                "index_gap",
                lambda gap: gap > audit.alarm_gap,
                "has a recall {:.3f} higher for the last queries than for others, more than "
                f"audit.alarm_gap = {audit.alarm_gap}",
                less_local,
            ),
        ]
        cosine = record.get("global_gradient_cosine")
        if cosine is not None and self._is_due("global", cosine < audit.alarm_gradient):
            sentences.append(
                f"the parameter gradient has a cosine of {cosine:.3f} with that of dense "
                f"attention on {self._config.gradient_tokens} tokens, less than "
                f"audit.alarm_gradient = {audit.alarm_gradient}; {more}"
            )
        return [sentence for sentence in sentences if sentence is not None]

    def _of_heads(
        self,
        record: Record,
        name: str,
        is_beyond: Callable[[np.ndarray], np.ndarray],
        what: str,
        advice: str,
    ) -> str | None:
        if name + PER_HEAD not in record:
            return None
        values = np.array(record[name + PER_HEAD], np.float64)
        number = int(is_beyond(values).sum())
        due, worst = self._is_due(name, number > 0), worst_head(record, name)
        if not due or worst is None:
            return None
        layer, head = worst
        others = f" (as do {number - 1} of {values.size - 1} others)" if number > 1 else ""
        return f"layer {layer} head {head} {what.format(values[worst])}{others}; {advice}"

    def _is_due(self, name: str, beyond: bool) -> bool:
        self._in_a_row[name] = self._in_a_row.get(name, 0) + 1 if beyond else 0
        return self._in_a_row[name] == 2
