"""From tokens as they come to text that will not change any more."""

from collections.abc import Callable, Sequence

from mtraining_jax.data.tokenizer import Tokenizer

# What decoders put for bytes that are not a whole character yet.
_INCOMPLETE = "\ufffd"


class GrowingText:
    """The text of tokens that come one by one.

    Attributes:
        text: of all tokens so far, without what comes from a stop text on.
        stopped: whether a stop text has come.

    Args:
        tokenizer: None leaves the text empty.
        stop: texts that end it.
        tell: called with each piece of text that is final.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: Sequence[str],
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._tokenizer, self._stop, self._tell = tokenizer, tuple(stop), tell
        self._ids: list[int] = []
        self._told = 0
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> None:
        """Takes one token more."""
        if self._tokenizer is None:
            return
        self._ids.append(token)
        self.text = self._tokenizer.decode(self._ids)
        places = [place for stop in self._stop if (place := self.text.find(stop)) >= 0]
        if places:
            self.text, self.stopped = self.text[: min(places)], True
        self._say(settled_length(self.text, () if self.stopped else self._stop))

    def end(self) -> str:
        """The whole text, when no more tokens come."""
        self._say(len(self.text))
        return self.text

    def _say(self, length: int) -> None:
        if self._tell is not None and length > self._told:
            self._tell(self.text[self._told : length])
            self._told = length


def settled_length(text: str, stop: Sequence[str]) -> int:
    """How many characters at the start of a growing text are final.

    Not final are an incomplete character at its end, and what may become a stop text.
    """
    end = len(text)
    while end and text[end - 1] == _INCOMPLETE:
        end -= 1
    longest = max((len(x) for x in stop), default=0)
    for start in range(max(0, end - longest + 1), end):
        if any(x.startswith(text[start:end]) for x in stop):
            return start
    return end
