"""Words of generated prompts: lists of English words, pairs of them, and made-up ones."""

import functools
from collections.abc import Sequence
from pathlib import Path

from mtraining_jax.utils.random_bits import Stream


@functools.cache
def words(kind: str) -> tuple[str, ...]:
    """Returns the words of a list ("nouns", "adjectives" or "verbs"), sorted and unique."""
    text = (Path(__file__).parent / f"{kind}.txt").read_text(encoding="utf-8")
    return tuple(sorted(set(text.split())))


def pairs_of_words(
    stream: Stream, adjectives: Sequence[str], nouns: Sequence[str], count: int
) -> list[str]:
    """Draws different pairs such as quiet-harbor."""
    drawn = stream.sample(len(adjectives) * len(nouns), count)
    return [f"{adjectives[i // len(nouns)]}-{nouns[i % len(nouns)]}" for i in drawn]


def letters_of(index: int, count: int) -> str:
    """Writes a number in base 26 with letters, the least significant one first."""
    return "".join(chr(ord("a") + index // 26**i % 26) for i in range(count))
