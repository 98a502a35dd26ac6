"""Sentences about heads that the sparse pattern serves badly; a run goes on."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mtraining_jax.config import Config
from mtraining_jax.errors import UserError
from mtraining_jax.reporting.audit import worst_head
from mtraining_jax.reporting.record import Record


class Alarms:
    """Looks at the audits of a run, one after the other.

    An alarm is told when a figure is beyond its limit in two audits in a row, since one audit sees
    few rows, and again only after it was within its limit. All processes of a run see the same.

    Args:
        config: of the run; the limits are `audit.alarm_...`.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._in_a_row: dict[str, int] = {}

    def state(self) -> dict[str, int]:
        """How many audits in a row each figure was beyond its limit: a dict that JSON can hold."""
        return dict(self._in_a_row)

    def go_to(self, state: Mapping[str, Any] | None) -> None:
        """Goes on from `state`, so that no stop hides an alarm or tells it again; None is anew.

        Raises:
            UserError: the state cannot be read.
        """
        try:
            self._in_a_row = {name: int(times) for name, times in (state or {}).items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError("the saved state of audit alarms is not readable") from error

    def of(self, record: Record) -> list[str]:
        """The alarms that this audit raises.

        Args:
            record: with what `audit_record` gives.

        Returns:
            Sentences, each with the layer and the head that are worst and the option to change.
        """
        audit = self._config.audit
        more = self._config.sparsity.settings.more_pairs()
        found = [
            self._of_heads(
                record, "recall", audit.alarm_recall, np.less,
                "keeps {value:.1%} of its attention's mass, less than audit.alarm_recall = "
                f"{audit.alarm_recall}", more,
            ),
            self._of_heads(
                record, "local_gradient_cosine", audit.alarm_gradient, np.less,
                "has a cosine of {value:.3f} between the gradients of its queries and those of "
                f"dense attention, less than audit.alarm_gradient = {audit.alarm_gradient}", more,
            ),
            self._of_heads(
                record, "index_gap", audit.alarm_gap, np.greater,
                "keeps {value:.3f} more of the mass of the last queries than of others, above "
                f"audit.alarm_gap = {audit.alarm_gap}",
                'sparsity.kind = "sampled_rows" chooses by queries from everywhere'
                if self._config.sparsity.kind != "sampled_rows" else more,
            ),
        ]  # fmt: skip
        cosine = record.get("global_gradient_cosine")
        limit = audit.alarm_gradient
        if cosine is not None and self._is_told("global", cosine < limit):
            found.append(
                f"the gradient of all parameters has a cosine of {cosine:.3f} with that of dense "
                f"attention on {self._config.gradient_tokens} tokens, less than "
                f"audit.alarm_gradient = {limit}; {more}"
            )
        return [sentence for sentence in found if sentence is not None]

    def _of_heads(
        self, record: Record, name: str, limit: float, beyond: Callable, what: str, advice: str
    ) -> str | None:
        if f"{name}_per_head" not in record:
            return None
        values = np.array(record[f"{name}_per_head"], np.float64)
        number = int(beyond(values, limit).sum())
        if not self._is_told(name, number > 0):
            return None
        layer, head = worst_head(record, name)
        others = f", and so do {number - 1} of {values.size - 1} others" if number > 1 else ""
        what = what.format(value=values[layer, head])
        return f"layer {layer} head {head} {what}{others}; {advice}"

    def _is_told(self, name: str, beyond: bool) -> bool:
        self._in_a_row[name] = self._in_a_row.get(name, 0) + 1 if beyond else 0
        return self._in_a_row[name] == 2
