"""RULER's word counting tasks (common_words_extraction.py, freq_words_extraction.py)."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from mtraining_jax.tools.evaluate.tasks.records import read_text
from mtraining_jax.tools.evaluate.tasks.sized import Draft, SizedTask
from mtraining_jax.tools.evaluate.tasks.words import letters_of, pairs_of_words, words
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.random_bits import Stream

_COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\nQuestion: What are the 10 most common "
    "words in the above list? Answer: The top 10 words that appear most often in the list are:"
)
_FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please "
    "ignore the dots '....'. What are the three most frequently appeared words in the above coded "
    "text? Answer: According to the coded text above, the three most frequently appeared words are:"
)
_NUM_COMMON = 10
# RULER has easier lists below this length.
_SHORT = 4096


@options(kw_only=True)
class CommonWords(SizedTask):
    """Finds the ten words that occur ten times as often as the others in a numbered list."""

    max_new_tokens: ClassVar[int] = 120
    min_size: ClassVar[int] = _NUM_COMMON + 1

    words: str | None = None
    """File with one word per line. By default words come from built-in lists of 2,500; longer
    prompts add hyphenated pairs of them."""

    @property
    def max_size(self) -> int:
        single, adjectives, nouns = _pools(self.words)
        return len(single) + len(adjectives) * len(nouns)

    def check(self) -> None:
        super().check()
        _pools(self.words)

    def build(self, size: int, length: int, number: int, seed: int) -> Draft:
        stream = self.stream(length, number, seed)
        example_counts, counts = ((20, 3, 1), (6, 1)) if length < _SHORT else ((40, 10, 3), (30, 3))
        shown, known = self._list(*example_counts, stream)
        context, common = self._list(size, *counts, stream)
        example = f"{_COMMON.format(context=shown)} {_numbered(known)}"
        prompt = f"{example}\n{_COMMON.format(context=context)}"
        return Draft(prompt=prompt, references=tuple(common))

    def _list(self, size: int, often: int, seldom: int, stream: Stream) -> tuple[str, list[str]]:
        single, adjectives, nouns = _pools(self.words)
        if size <= len(single):
            different = [single[i] for i in stream.sample(len(single), size)]
        else:
            pairs = pairs_of_words(stream, adjectives, nouns, size - len(single))
            all_words = [*single, *pairs]
            different = [all_words[i] for i in stream.order(size)]
        common, others = different[:_NUM_COMMON], different[_NUM_COMMON:]
        listed = common * often + others * seldom
        return _numbered([listed[i] for i in stream.order(len(listed))]), common


@options(kw_only=True)
class FrequentWords(SizedTask):
    """Finds the three most frequent made-up words, with counts from a zeta distribution."""

    max_new_tokens: ClassVar[int] = 50
    # With fewer, the fourth most frequent word occurs no more often than the fifth.
    min_size: ClassVar[int] = 80

    def build(self, size: int, length: int, number: int, seed: int) -> Draft:
        stream = self.stream(length, number, seed)
        different = max((length - self.max_new_tokens) // 50, 5)
        coded = [letters_of(i, 6) for i in stream.sample(26**6, different)]
        coded[0] = "..."  # the most frequent one is noise
        ranks = np.arange(1, different + 1)
        zeta_of_2 = np.pi**2 / 6
        counts = (size / ranks.astype(float) ** 2 / zeta_of_2).astype(np.int64)
        text = np.repeat(ranks - 1, counts)
        context = " ".join([coded[i] for i in text[stream.order(text.size)]])
        return Draft(prompt=_FREQUENT.format(context=context), references=tuple(coded[1:4]))


def _numbered(items: list[str]) -> str:
    return " ".join([f"{i}. {item}" for i, item in enumerate(items, 1)])


@functools.lru_cache(maxsize=8)
def _pools(path: str | None) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """Returns single words, and adjectives and nouns to build pairs from."""
    if path is None:
        lists = [words(kind) for kind in ("nouns", "adjectives", "verbs")]
        return sorted({word for each in lists for word in each}), lists[1], lists[0]
    text = read_text(Path(path), "words")
    single = sorted({line.strip() for line in text.splitlines() if line.strip()})
    # The example needs 40 words.
    if len(single) < 40:
        raise UserError(f'words: "{path}" has {len(single)} different words; it must have 40')
    return single, (), ()
