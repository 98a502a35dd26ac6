"""Lists of English words."""

import functools
from pathlib import Path


@functools.cache
def words(kind: str) -> tuple[str, ...]:
    """Returns the words of a list ("nouns", "adjectives" or "verbs"), sorted and unique."""
    text = (Path(__file__).parent / f"{kind}.txt").read_text(encoding="utf-8")
    return tuple(sorted(set(text.split())))
