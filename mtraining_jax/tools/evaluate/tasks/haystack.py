"""Text to hide needles in: noise, essays from the user, or generated sentences."""

import bisect
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mtraining_jax.data.files import find_files
from mtraining_jax.tools.evaluate.tasks.records import read_text
from mtraining_jax.tools.evaluate.tasks.sized import SizedTask
from mtraining_jax.tools.evaluate.tasks.words import sentence_templates, words
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.random_bits import Stream

# Landmark Attention's irrelevant text (Mohtashami and Jaggi, 2023), RULER's "noise".
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class Haystack:
    """An endless series of sentences; `first` returns the same ones each time."""

    def __init__(self, sentences: Iterator[str]) -> None:
        self._sentences, self._taken = sentences, list[str]()

    def first(self, count: int) -> list[str]:
        self._taken += itertools.islice(self._sentences, max(0, count - len(self._taken)))
        return self._taken[:count]


def _generated() -> Iterator[str]:
    """Templates with random words, always the same: like prose for a tokenizer."""
    stream, templates = Stream(seed=1), sentence_templates()
    nouns, adjectives, verbs = (words(kind) for kind in ("nouns", "adjectives", "verbs"))
    lists = {"n": nouns, "m": nouns, "a": adjectives, "b": adjectives, "v": verbs}
    limits = np.array([len(templates), *map(len, lists.values())] * 8192)
    while True:
        for template, *drawn in stream.below_each(limits).reshape(8192, -1).tolist():
            chosen = {key: lists[key][i] for key, i in zip(lists, drawn, strict=True)}
            yield templates[template].format(**chosen)


@functools.lru_cache(maxsize=8)
def essays(path: str | None) -> Haystack:
    """Returns the sentences of a file, a folder of .txt files or a glob; None generates them."""
    if path is None:
        return Haystack(_generated())
    files = find_files([path], [".txt"], field="essays")
    text = " ".join(read_text(file, "essays") for file in files)
    # Collapse white space, as RULER does; a sentence ends at a stop before a space.
    sentences = re.split(r"(?<=[.!?]) ", " ".join(text.split()))
    if sentences == [""]:
        raise UserError(f'essays: "{path}" contains no text')
    return Haystack(itertools.cycle(sentences))


def insert_at_depth(sentences: list[str], needle: str, depth: float) -> list[str]:
    """Inserts a needle after `depth` of the characters, rounded down to the end of a sentence."""
    ends = list(itertools.accumulate(map(len, sentences)))
    place = bisect.bisect_right(ends, depth * ends[-1] + 0.5)
    return [*sentences[:place], needle, *sentences[place:]]


@options(kw_only=True)
class EssayTask(SizedTask):
    """A task with needles between sentences."""

    essays: str | None = None
    """File, folder of .txt files or glob with the text of the haystack; by default sentences are
    generated from word lists."""

    @property
    def files(self) -> list[Path]:
        return find_files([self.essays], [".txt"], field="essays") if self.essays else []

    def check(self) -> None:
        super().check()
        essays(self.essays)
