"""Turns a stream of tokens into final text."""

import codecs
from collections.abc import Callable, Sequence

import numpy as np

from mtraining_jax.data.tokenizer import Tokenizer


class GrowingText:
    """The text of a stream of tokens, up to a stop text; `report` receives what is final.

    A stop text is searched in the text with special tokens, which the result does not have. For
    each token a constant number of ids is decoded.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Sequence[str],
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._tokenizer, self._stop, self._report = tokenizer, tuple(stop), report
        self._ids: list[int] = []
        self._pieces = None if tokenizer is None else _Pieces(tokenizer)
        # The end of the text that may begin a stop text, and "1" for each visible character of it.
        self._open, self._visible = "", ""
        self._unreported, self._reported = "", 0
        self._cut = 0  # visible characters from the stop text on
        self.stopped = False

    def add(self, token: int) -> None:
        if self._pieces is None:
            return
        self._ids.append(token)
        text, final, special = self._pieces.add(token)
        self._open += text
        self._visible += ("0" if special else "1") * len(text)
        starts = [start for stop in self._stop if (start := self._open.find(stop)) >= 0]
        if starts:
            self.stopped = True
            self._cut = self._visible[min(starts) :].count("1")
            self._cut += not special and self._pieces.inside_character
            return
        start = possible_start(self._open, self._stop)
        self._open, self._visible = self._open[start:], self._visible[start:]
        self._unreported += final
        held = max(0, self._visible.count("1") - self._pieces.unsettled)
        length = len(self._unreported) - held
        self._say(self._unreported[:length])
        self._unreported = self._unreported[length:]

    def end(self) -> str:
        text = "" if self._tokenizer is None else self._tokenizer.decode(np.asarray(self._ids))
        text = text[: max(0, len(text) - self._cut)]
        self._say(text[self._reported :])
        return text

    def _say(self, text: str) -> None:
        if self._report is not None and text:
            self._report(text)
            self._reported += len(text)


class _Pieces:
    """The texts of single tokens. Joined, they are the text of all."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._previous: list[int] = []  # the last token before the run, unless there is none
        # If one byte of a run is wrong, decoders may replace all of them.
        self._run: list[int] = []
        self.unsettled = 0  # characters of the run

    @property
    def inside_character(self) -> bool:
        return self._utf8.getstate()[0] != b""

    def add(self, token: int) -> tuple[str, str, bool]:
        """Returns the text of a token, what it makes final, and whether it is special."""
        if self._decode([token]) != self._decode([token], special=True):
            broken = "\ufffd" * self.inside_character
            return broken + self._after_previous([token], special=True), "", True
        units = self._tokenizer.token_bytes(token)
        if units is not None:
            text = self._utf8.decode(units)
            if self._tokenizer.byte_level:
                return text, text, False
            self._run += [token] * bool(units)
            self.unsettled += len(text)
            return text, "", False
        final = ""
        if self._run:
            final = self._after_previous(self._run)
            self._previous, self._run, self.unsettled = self._run[-1:], [], 0
            self._utf8.reset()
        text = self._after_previous([token])
        self._previous = [token]
        return text, final + text, False

    def _after_previous(self, ids: list[int], special: bool = False) -> str:
        """Decoders treat the first token of a text differently."""
        before = len(self._decode(self._previous, special))
        return self._decode([*self._previous, *ids], special)[before:]

    def _decode(self, ids: list[int], special: bool = False) -> str:
        return self._tokenizer.decode(np.asarray(ids, np.int64), special)


def possible_start(text: str, stop: Sequence[str]) -> int:
    """Returns where the first part of a stop text may end the text, or its length if nowhere."""
    longest = max((len(x) for x in stop), default=0)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if any(x.startswith(text[start:]) for x in stop):
            return start
    return len(text)
