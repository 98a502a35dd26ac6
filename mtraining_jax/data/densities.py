"""The density of documents by their length: moving averages of what finished steps measured."""

import threading
from typing import Any

import numpy as np

from mtraining_jax.errors import UserError

# Batches are read up to three steps before the step that measures what they could use: the loader
# keeps two ahead, and a step is reported when the next one has begun. A fixed distance makes the
# order of sequences the same on every process and in every run.
DELAY = 4
# Share of an average that stays when a step is added.
KEEP = 0.9


def length_classes(lengths: np.ndarray, block_size: int) -> np.ndarray:
    """The class of each document: k of 2^k to 2^(k+1) - 1 blocks, its last one counted as whole.

    Args:
        lengths: integers of any shape, real tokens, at least 1.
        block_size: g.

    Returns:
        int64, of the same shape.
    """
    blocks = -(-np.asarray(lengths, np.int64) // block_size)
    return np.frexp(blocks.astype(np.float64))[1].astype(np.int64) - 1


def num_classes(num_blocks: int) -> int:
    """Classes of documents of up to `num_blocks` blocks."""
    return num_blocks.bit_length()


class OtherPlace(Exception):
    """The data went to another place, or was closed, while a batch waited for a density."""


class Densities:
    """Averages by class of length, as they were after each of the last steps.

    One thread may add measurements while another waits for them.

    Attributes:
        place: another number after each call of `go_to` and `close`.

    Args:
        start: floats [K] in [0, 1], by class, before anything is measured.
    """

    def __init__(self, start: np.ndarray) -> None:
        self._start = np.asarray(start, np.float64)
        self._changed = threading.Condition()
        self.place = 0
        self._begin(0, {0: self._start})

    def _begin(self, newest: int, after: dict[int, np.ndarray]) -> None:
        self._after, self._first, self._newest = after, min(after), newest

    def before(self, step: int, place: int | None = None) -> np.ndarray:
        """The averages [K] that the batch of a step is dealt by: those after step - `DELAY`.

        Waits until that step is added.

        Args:
            step: its number.
            place: `self.place` when it was decided to read this batch; None is now.

        Raises:
            OtherPlace: if `go_to` or `close` was called since then.
        """
        with self._changed:
            place = self.place if place is None else place
            needed = max(step - DELAY, self._first)
            self._changed.wait_for(lambda: self.place != place or needed <= self._newest)
            if self.place != place:
                raise OtherPlace
            return self._after[needed]

    def known_before(self, step: int) -> bool:
        """Whether `before` would not wait."""
        with self._changed:
            return max(step - DELAY, self._first) <= self._newest

    def add(self, step: int, measured: np.ndarray) -> None:
        """Takes what a step measured.

        Args:
            step: its number; steps are added in order, each once.
            measured: floats [K]; not finite where there was nothing to measure.
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
        """The averages after each of the last steps: a small dict that JSON can hold."""
        with self._changed:
            return {str(step): self._after[step].tolist() for step in sorted(self._after)}

    def go_to(self, step: int, state: dict[str, Any] | None) -> None:
        """Goes to where the next batch is that of `step` + 1.

        Args:
            step: the last one whose batch was handed out.
            state: from `state`; None starts from what is taken for granted.

        Raises:
            UserError: the state cannot be read.
        """
        after = {step: self._start}
        if state is not None:
            try:
                after = {int(at): np.array(x, np.float64) for at, x in state.items()}
            except (AttributeError, TypeError, ValueError) as error:
                raise UserError("the saved densities of the data are not readable") from error
            if not after or any(x.shape != self._start.shape for x in after.values()):
                raise UserError(
                    "the saved densities of the data are not of as many lengths as there are, "
                    f"{self._start.size}"
                )
        with self._changed:
            self._begin(max(after), after)
            self.place += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all waiting."""
        with self._changed:
            self.place += 1
            self._changed.notify_all()
