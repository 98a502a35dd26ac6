"""RULER's eight needle tasks (scripts/data/synthetic/niah.py)."""

import uuid
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from mtraining_jax.tools.evaluate.tasks.haystack import NOISE, EssayTask, essays
from mtraining_jax.tools.evaluate.tasks.sized import Draft
from mtraining_jax.tools.evaluate.tasks.words import pairs_of_words, words
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.random_bits import Stream

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
class Variant:
    """What a needle task hides between what, and how much of it the question asks for."""

    haystack: Literal["noise", "essay", "needle"]
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


VARIANTS = {
    "ruler_niah_single_1": Variant("noise"),
    "ruler_niah_single_2": Variant("essay"),
    "ruler_niah_single_3": Variant("essay", value="uuids"),
    "ruler_niah_multikey_1": Variant("essay", keys=4),
    "ruler_niah_multikey_2": Variant("needle"),
    "ruler_niah_multikey_3": Variant("needle", key="uuids", value="uuids"),
    "ruler_niah_multivalue": Variant("essay", values=4),
    "ruler_niah_multiquery": Variant("essay", keys=4, queries=4),
}


@options(kw_only=True)
class RulerNeedles(EssayTask):
    """Finds the values of one or several keys that sentences in a long text give."""

    max_new_tokens: ClassVar[int] = 128

    @property
    def teacher_forced(self) -> bool:
        variant = VARIANTS[self.name]
        return variant.queries * variant.values == 1  # several may be listed in any order

    @property
    def min_size(self) -> int:
        return VARIANTS[self.name].keys * VARIANTS[self.name].values

    def build(self, size: int, length: int, number: int, seed: int) -> Draft:
        variant = VARIANTS[self.name]
        key_stream, value_stream, stream = (self.stream(length, number, seed, i) for i in range(3))
        distractors = size if variant.haystack == "needle" else 0
        keys = _texts(variant.key, key_stream, variant.keys + distractors)
        count = variant.keys * variant.values
        values = _texts(variant.value, value_stream, count + distractors)
        owners = [key for key in keys[: variant.keys] for _ in range(variant.values)]
        needles = [
            f"One of the special magic {variant.value} for {key} is: {value}."
            for key, value in zip(owners + keys[variant.keys :], values, strict=True)
        ]
        asked = stream.sample(variant.keys, variant.queries)
        queries = [keys[i] for i in asked]
        answers = [values[i * variant.values + j] for i in asked for j in range(variant.values)]
        hidden = [needles[i] for i in stream.order(count)]
        if variant.haystack == "essay":
            pieces, separator = essays(self.essays).first(size), " "
            places = [int(size * _DEPTHS[i] / 100) for i in stream.sample(40, count)]
        else:
            pieces = needles[count:] if variant.haystack == "needle" else [NOISE] * size
            separator = "\n"
            places = stream.sample(size, count)
        for place, needle in zip(sorted(places, reverse=True), hidden, strict=True):
            pieces.insert(place, needle)
        one = len(answers) == 1
        query = ", ".join([*queries[:-1], f"and {queries[-1]}"]) if len(queries) > 1 else queries[0]
        return Draft(
            prompt=(_ONE if one else _MANY).format(
                kind=variant.value[:-1] if one else variant.value,
                context=separator.join(pieces),
                query=query,
            ),
            references=tuple(answers),
            answer=f" {answers[0]}" if one else None,
            given=":" if one else "",
        )


def _texts(kind: str, stream: Stream, count: int) -> list[str]:
    """Returns random keys or values; the first do not depend on the count, words are unique."""
    if kind == "words":
        return pairs_of_words(stream, words("adjectives"), words("nouns"), count)
    if kind == "numbers":
        return [str(x) for x in 1_000_000 + stream.below_each(np.full(count, 9_000_000))]
    bits = stream.bits(2 * count).reshape(count, 2).tolist()
    return [str(uuid.UUID(int=high << 64 | low, version=4)) for high, low in bits]
