"""Turns a stream of tokens into final text."""

from collections.abc import Callable, Sequence

import numpy as np

from mtraining_jax.data.tokenizer import Tokenizer

# Decoders return this for the bytes of an incomplete character.
_INCOMPLETE = "\ufffd"


class GrowingText:
    """The text of a stream of tokens, up to a stop text; `report` receives what is final."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Sequence[str],
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._tokenizer, self._stop, self._report = tokenizer, tuple(stop), report
        self._ids: list[int] = []
        self._reported = 0
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> None:
        if self._tokenizer is None:
            return
        self._ids.append(token)
        self.text = self._tokenizer.decode(np.asarray(self._ids))
        starts = [start for stop in self._stop if (start := self.text.find(stop)) >= 0]
        if starts:
            self.text, self.stopped = self.text[: min(starts)], True
        self._say(settled_length(self.text, () if self.stopped else self._stop))

    def end(self) -> str:
        self._say(len(self.text))
        return self.text

    def _say(self, length: int) -> None:
        if self._report is not None and length > self._reported:
            self._report(self.text[self._reported : length])
            self._reported = length


def settled_length(text: str, stop: Sequence[str]) -> int:
    """Returns the length without an incomplete character or a possible start of a stop text."""
    end = len(text.rstrip(_INCOMPLETE))
    longest = max((len(x) for x in stop), default=0)
    for start in range(max(0, end - longest + 1), end):
        if any(x.startswith(text[start:end]) for x in stop):
            return start
    return end
