"""Words of generated prompts: lists of English words, pairs of them, and made-up ones."""

import functools
from collections.abc import Sequence
from pathlib import Path

from mtraining_jax.utils.random_bits import Stream


@functools.cache
def words(kind: str) -> tuple[str, ...]:
    """Returns the words of a list ("nouns", "adjectives", "verbs" or "cities"), sorted."""
    return tuple(sorted(set(_read(kind).split())))


def sentence_templates() -> list[str]:
    """Returns templates with nouns n and m, adjectives a and b, and a verb v."""
    return _read("sentences").splitlines()


def _read(name: str) -> str:
    return (Path(__file__).parent / f"{name}.txt").read_text(encoding="utf-8")


def pairs_of_words(
    stream: Stream, adjectives: Sequence[str], nouns: Sequence[str], count: int
) -> list[str]:
    """Draws different pairs such as quiet-harbor."""
    drawn = stream.sample(len(adjectives) * len(nouns), count)
    return [f"{adjectives[i // len(nouns)]}-{nouns[i % len(nouns)]}" for i in drawn]


def letters_of(index: int, count: int) -> str:
    """Writes a number in base 26 with letters, the least significant one first."""
    return "".join(chr(ord("a") + index // 26**i % 26) for i in range(count))
