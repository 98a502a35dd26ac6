"""Limits above which a loss or a gradient norm looks wrong, by those of the steps before."""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence

_STEPS, _LEAST_STEPS = 50, 10
# Robust deviations from the median, 1.4826 times the median distance, of the loss and of the norm's
# logarithm; and the least distances.
_LOSS, _LEAST_PART = 12, 0.05
_NORM, _LEAST_FACTOR = 6, 5


class Outliers:
    """Losses and gradient norms of the newest steps that were applied.

    Limits are the median loss plus 12 robust standard deviations, but at least 5 % more; and of
    the norms' logarithms the same with 6, but at least 5 times the median norm.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_STEPS)
        self._norms: deque[float] = deque(maxlen=_STEPS)

    def add(self, loss: float, norm: float) -> None:
        """Adds a step, unless its values are not finite, or 0 as without labels."""
        if math.isfinite(loss + norm) and norm > 0:
            self._losses.append(loss)
            self._norms.append(norm)

    def limits(self) -> tuple[float, float]:
        """Largest usual loss and norm; infinite after too few steps."""
        if len(self._norms) < _LEAST_STEPS:
            return math.inf, math.inf
        loss, of_losses = _center(self._losses)
        norm, of_norms = _center([math.log(x) for x in self._norms])
        above = max(_LOSS * of_losses, _LEAST_PART * abs(loss))
        return loss + above, math.exp(norm + max(_NORM * of_norms, math.log(_LEAST_FACTOR)))

    def state(self) -> list[list[float]]:
        """JSON-serializable."""
        return [list(self._losses), list(self._norms)]

    def go_to(self, state: Iterable[Iterable[float]]) -> None:
        """Restores `state`."""
        for values, saved in zip((self._losses, self._norms), state, strict=True):
            values.clear()
            values.extend(saved)


def _center(values: Sequence[float]) -> tuple[float, float]:
    """The median, and a robust standard deviation."""
    median = statistics.median(values)
    return median, 1.4826 * statistics.median(abs(x - median) for x in values)
