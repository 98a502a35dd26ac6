"""Moving averages of measured density by document length."""

import threading
from typing import Any

import numpy as np

from mtraining_jax.utils.errors import UserError

# Steps between a measurement and its use. The loader prefetches two batches, and a step is reported
# after the next one has started. A fixed delay makes the order of sequences deterministic.
DELAY = 4
# Decay of the moving average.
KEEP = 0.9


def length_classes(lengths: np.ndarray, block_size: int) -> np.ndarray:
    """The length class of documents of n > 0 tokens, int64: k for 2^k to 2^(k+1) - 1 blocks."""
    blocks = -(-np.asarray(lengths, np.int64) // block_size)
    return np.frexp(blocks.astype(np.float64))[1].astype(np.int64) - 1


def num_classes(num_blocks: int) -> int:
    """Number of length classes of documents of up to `num_blocks` blocks."""
    return num_blocks.bit_length()


class OtherPlace(Exception):
    """The loader was repositioned or closed while a batch waited for a density."""


class Densities:
    """Thread-safe moving averages by length class after each of the last steps.

    Args:
        start: initial values, floats [K] in [0, 1].
    """

    def __init__(self, start: np.ndarray) -> None:
        self._start = np.asarray(start, np.float64)
        self._changed = threading.Condition()
        self.place = 0
        self._begin(0, {0: self._start})

    def _begin(self, newest: int, after: dict[int, np.ndarray]) -> None:
        self._after, self._first, self._newest = after, min(after), newest

    def before(self, step: int, place: int | None = None) -> np.ndarray:
        """The averages [K] used for the batch of a step: after step - `DELAY`; waits for them.

        Args:
            step: step of the batch.
            place: `self.place` when the read was scheduled; None for now.

        Raises:
            OtherPlace: `go_to` or `close` was called since then.
        """
        with self._changed:
            place = self.place if place is None else place
            needed = max(step - DELAY, self._first)
            self._changed.wait_for(lambda: self.place != place or needed <= self._newest)
            if self.place != place:
                raise OtherPlace
            return self._after[needed]

    def known_before(self, step: int) -> bool:
        """Whether `before` would return immediately."""
        with self._changed:
            return max(step - DELAY, self._first) <= self._newest

    def add(self, step: int, measured: np.ndarray) -> None:
        """Adds the measurements of the next step.

        Args:
            measured: floats [K]; not finite if not measured.
        """
        with self._changed:
            if step != self._newest + 1:
                raise ValueError(f"step {step} is added after step {self._newest}")
            old = self._after[self._newest]
            measured = np.asarray(measured, np.float64)
            seen = np.isfinite(measured)
            new = np.where(seen, KEEP * old + (1 - KEEP) * np.where(seen, measured, 0.0), old)
            self._after[step], self._newest = new, step
            for past in [past for past in self._after if past < step - 2 * DELAY]:
                del self._after[past]
            self._first = min(self._after)
            self._changed.notify_all()

    def state(self) -> dict[str, Any]:
        """JSON-serializable state: the averages after each of the last steps."""
        with self._changed:
            return {str(step): self._after[step].tolist() for step in sorted(self._after)}

    def go_to(self, step: int, state: dict[str, Any] | None) -> None:
        """Restores a state such that the next batch is that of `step` + 1.

        Args:
            state: from `state`; None uses the initial values.
        """
        after = {step: self._start}
        if state is not None:
            try:
                after = {int(at): np.array(x, np.float64) for at, x in state.items()}
            except (AttributeError, TypeError, ValueError) as error:
                raise UserError("the saved densities of the data are not readable") from error
            if not after or any(x.shape != self._start.shape for x in after.values()):
                raise UserError(
                    "the saved densities of the data do not have the expected number of length "
                    f"classes, {self._start.size}"
                )
        with self._changed:
            self._begin(max(after), after)
            self.place += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Wakes all waiting threads."""
        with self._changed:
            self.place += 1
            self._changed.notify_all()
