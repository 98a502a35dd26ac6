"""Our own lists of English words."""

import functools
from pathlib import Path


@functools.cache
def words(kind: str) -> tuple[str, ...]:
    """The words of a list, in alphabetical order, each once.

    Args:
        kind: "nouns", "adjectives" or "verbs".
    """
    text = (Path(__file__).parent / f"{kind}.txt").read_text(encoding="utf-8")
    return tuple(sorted(set(text.split())))
