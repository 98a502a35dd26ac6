"""Text to hide needles in: noise, essays from the user, or generated sentences."""

import functools
import re
from pathlib import Path

import numpy as np

from mtraining_jax.data.files import find_files
from mtraining_jax.evaluation.tasks.words import words
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.random_bits import Stream

# Landmark Attention's irrelevant text (Mohtashami and Jaggi, 2023), RULER's "noise".
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

# Random adjectives, nouns and verbs: like prose for a tokenizer, and no two sentences are equal.
_PATTERNS = (
    "The {a} {n} stood behind the {m} for many years.",
    "Nobody in the {n} trade wanted to {v} another {m}.",
    "Whoever looks after the {n} must also {v} the {m}, however {a} it seems.",
    "In the end the {n} was {a}, and the {m} was {b}.",
    "Each {n} that we saw had its own {a} {m}.",
    "They decided to {v} the {n} before the {b} {m} came back.",
    "It takes some {n} to {v} this kind of {m}.",
    "Between the {n} and the {m} there was only {a} ground.",
    "Some people {v} their {n} in winter, when the {m} is {a}.",
    "My sister bought the {a} {n} and sold the {m} on the same day.",
    "Without that {n}, the {b} {m} would hardly be {a}.",
    "What makes the {n} so {a} is the {m} under it.",
    "You could {v} one {n} after the other and never reach the {m}.",
    "The letter spoke of some {a} {n}, but said little about the {m}.",
    "Early that morning the {n} looked {a}, almost like the {b} {m}.",
    "Everyone agreed to {v} the {m} and to leave the {n} alone.",
    "Then the {a} {n} turned towards the {m}, and the talk went on.",
    "There is no {n} so {a} that the {m} could not {v} it.",
    "His idea was to {v} every {b} {n} in the valley, {m} or not.",
    "For the {n} this was {a} news; for the {m} it was not.",
)


class Sentences:
    """A text as a list of at least one sentence, repeated as often as needed."""

    def __init__(self, sentences: list[str]):
        self._sentences = sentences

    def first(self, count: int) -> list[str]:
        repeats, rest = divmod(count, len(self._sentences))
        return self._sentences * repeats + self._sentences[:rest]


class OwnSentences(Sentences):
    """Sentences generated from templates and word lists, always the same and never repeated."""

    def __init__(self) -> None:
        super().__init__([])
        self._stream = Stream(seed=1)

    def first(self, count: int) -> list[str]:
        while len(self._sentences) < count:
            self._sentences += self._make(8192)
        return self._sentences[:count]

    def _make(self, count: int) -> list[str]:
        lists = [_PATTERNS, *(words(kind) for kind in ("nouns", "nouns", "adjectives"))]
        lists += [words("adjectives"), words("verbs")]
        limits = np.array([len(each) for each in lists] * count)
        drawn = self._stream.below_each(limits).reshape(count, len(lists)).tolist()
        pattern, *chosen = lists
        return [
            pattern[row[0]].format(
                **{key: each[i] for key, each, i in zip("nmabv", chosen, row[1:], strict=True)}
            )
            for row in drawn
        ]


@functools.lru_cache(maxsize=8)
def essays(path: str | None) -> Sentences:
    """Returns the sentences of a file, a folder of .txt files or a glob; None generates them.

    Raises:
        UserError: if there is no such file, or no text in it.
    """
    if path is None:
        return OwnSentences()
    text = " ".join(_read(file) for file in find_files([path], [".txt"], field="essays"))
    # Collapse white space, as RULER does; a sentence ends at a stop before a space.
    sentences = re.split(r"(?<=[.!?]) ", " ".join(text.split()))
    if sentences == [""]:
        raise UserError(f'essays: "{path}" contains no text')
    return Sentences(sentences)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"essays: {file} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"essays: {file} is not UTF-8 text ({error})") from error


def insert_at_depth(sentences: list[str], needle: str, depth: float) -> list[str]:
    """Inserts a needle after `depth` of the characters, rounded down to the end of a sentence."""
    wanted = depth * sum(map(len, sentences))
    place = before = 0
    while place < len(sentences) and before + len(sentences[place]) <= wanted + 0.5:
        before += len(sentences[place])
        place += 1
    return [*sentences[:place], needle, *sentences[place:]]
