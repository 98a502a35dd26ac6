"""RULER's eight needle tasks (scripts/data/synthetic/niah.py)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from mtraining_jax.evaluation.tasks.haystack import NOISE, essays
from mtraining_jax.evaluation.tasks.ruler.base import RulerTask
from mtraining_jax.evaluation.tasks.sized import Draft
from mtraining_jax.evaluation.tasks.words import words
from mtraining_jax.utils.random_bits import Stream

_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_MANY = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} "
    "for {query} mentioned in the provided text? The special magic {kind} for {query} mentioned in "
    "the provided text are"
)
_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will "
    "quiz you about the {kind} afterwards.\n{context}\nWhat is the special magic {kind} for "
    "{query} mentioned in the provided text? The special magic {kind} for {query} mentioned in the "
    "provided text is"
)
# Depths of needles between essays: 40 evenly spaced percentages.
_DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int)


@dataclass(frozen=True)
class _Variant:
    haystack: Literal["noise", "essay", "needle"]
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


_VARIANTS = {
    "ruler_niah_single_1": _Variant("noise"),
    "ruler_niah_single_2": _Variant("essay"),
    "ruler_niah_single_3": _Variant("essay", value="uuids"),
    "ruler_niah_multikey_1": _Variant("essay", keys=4),
    "ruler_niah_multikey_2": _Variant("needle"),
    "ruler_niah_multikey_3": _Variant("needle", key="uuids", value="uuids"),
    "ruler_niah_multivalue": _Variant("essay", values=4),
    "ruler_niah_multiquery": _Variant("essay", keys=4, queries=4),
}


@dataclass(frozen=True, kw_only=True)
class RulerNeedles(RulerTask):
    """Finds the values of one or several keys that sentences in a long text give.

    Attributes:
        essays: File, folder of .txt files or glob with the text of the haystack; by default
            sentences are generated from word lists.
    """

    max_new_tokens: ClassVar[int] = 128

    essays: str | None = None

    @property
    def _variant(self) -> _Variant:
        return _VARIANTS[self.name]

    @property
    def teacher_forced(self) -> bool:
        """Whether a single value is asked for; several may be listed in any order."""
        return self._variant.queries * self._variant.values == 1

    @property
    def least_size(self) -> int:
        """The number of needles."""
        return self._variant.keys * self._variant.values

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        essays(self.essays)

    def build(self, size: int, length: int, number: int, seed: int) -> Draft:
        """Builds a draft; a piece is one repetition of the noise, a sentence or a needle."""
        variant = self._variant
        key_stream, value_stream, stream = (self.stream(length, number, seed, i) for i in range(3))
        distractors = size if variant.haystack == "needle" else 0
        keys = _texts(variant.key, key_stream, variant.keys + distractors)
        count = variant.keys * variant.values
        values = _texts(variant.value, value_stream, count + distractors)
        owners = [key for key in keys[: variant.keys] for _ in range(variant.values)]
        needles = [
            _NEEDLE.format(kind=variant.value, key=key, value=value)
            for key, value in zip(owners + keys[variant.keys :], values, strict=True)
        ]
        asked = stream.sample(variant.keys, variant.queries)
        queries = [keys[i] for i in asked]
        answers = [values[i * variant.values + j] for i in asked for j in range(variant.values)]
        hidden = [needles[i] for i in stream.order(count)]
        context = self._hide(hidden, needles[count:], size, stream)
        one = len(answers) == 1
        return Draft(
            prompt=(_ONE if one else _MANY).format(
                kind=variant.value[:-1] if one else variant.value,
                context=context,
                query=_listed(queries),
            ),
            references=tuple(answers),
            answer=f" {answers[0]}" if one else None,
            given=":" if one else "",
        )

    def _hide(self, hidden: list[str], distractors: list[str], size: int, stream: Stream) -> str:
        kind = self._variant.haystack
        if kind == "essay":
            pieces, between = essays(self.essays).first(size), " "
            places = [int(size * _DEPTHS[i] / 100) for i in stream.sample(40, len(hidden))]
        else:
            pieces, between = distractors if kind == "needle" else [NOISE] * size, "\n"
            places = stream.sample(size, len(hidden))
        for place, needle in zip(sorted(places, reverse=True), hidden, strict=True):
            pieces.insert(place, needle)
        return between.join(pieces)


def _texts(kind: str, stream: Stream, count: int) -> list[str]:
    """Returns random keys or values; the first do not depend on the count, words are unique."""
    if kind == "words":
        adjectives, nouns = words("adjectives"), words("nouns")
        drawn = stream.sample(len(adjectives) * len(nouns), count)
        return [f"{adjectives[i // len(nouns)]}-{nouns[i % len(nouns)]}" for i in drawn]
    if kind == "numbers":
        return [str(x) for x in 1_000_000 + stream.below_each(np.full(count, 9_000_000))]
    return [_uuid(high, low) for high, low in stream.bits(2 * count).reshape(count, 2).tolist()]


def _uuid(high: int, low: int) -> str:
    """Builds a version 4 UUID from two 64-bit numbers."""
    digits = f"{high:016x}{low:016x}"
    variant = "89ab"[int(digits[16], 16) % 4]
    parts = (digits[:8], digits[8:12], "4" + digits[13:16], variant + digits[17:20], digits[20:])
    return "-".join(parts)


def _listed(queries: list[str]) -> str:
    if len(queries) == 1:
        return queries[0]
    return ", ".join(queries[:-1]) + f", and {queries[-1]}"
