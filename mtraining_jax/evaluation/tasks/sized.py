"""Tasks whose prompt is made to measure: a haystack of as many pieces as the length allows."""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.evaluation.tasks.task import Sample, Task
from mtraining_jax.evaluation.tasks.tokens import largest_size
from mtraining_jax.limits import check_limits, limited


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The text of a sample, before it is known to fit; fields as of `Task.text_sample`."""

    prompt: str
    references: tuple[str, ...]
    answer: str | None = None
    given: str = ""
    depth: float | None = None


@dataclass(frozen=True, kw_only=True)
class SizedTask(Task):
    """Derived classes write `build`.

    The size of the haystack is found once for each length and tokenizer, with a sample that is
    used for nothing else. A sample that comes out longer than that one gets a smaller haystack.

    Attributes:
        max_new_tokens: most tokens of an answer.
        least_size, most_size: pieces of the smallest and of the largest haystack.
    """

    max_new_tokens: ClassVar[int]
    least_size: ClassVar[int] = 1
    most_size: ClassVar[int] = 2**30

    def __post_init__(self) -> None:
        check_limits(self)

    def new_tokens(self, length: int) -> int:
        """Most tokens of an answer."""
        return self.max_new_tokens

    def build(self, size: int, length: int, number: int, seed: int) -> Draft:
        """Makes the text of a sample.

        Args:
            size: pieces of the haystack, at least `least_size`.
            length, number, seed: as of `sample`. The number -1 is the sample that sizes are
                measured with.
        """
        raise NotImplementedError(f"{type(self).__name__}.build")

    def sample(self, length: int, number: int, seed: int, tokenizer: Tokenizer | None) -> Sample:
        """As of `Task`."""
        size, new_tokens = _size(self, length, tokenizer), self.new_tokens(length)
        while True:
            draft = self.build(size, length, number, seed)
            ids = tokenizer.encode(draft.prompt)
            excess = len(ids) + new_tokens - length
            if excess <= 0 or size <= self.least_size:
                return self.text_sample(
                    tokenizer,
                    draft.prompt,
                    prompt_ids=ids,
                    length=length,
                    number=number,
                    references=draft.references,
                    max_new_tokens=new_tokens,
                    answer=draft.answer,
                    given=draft.given,
                    depth=draft.depth,
                )
            size = max(self.least_size, size - math.ceil(excess * size / len(ids)))


@functools.lru_cache(maxsize=256)
def _size(task: SizedTask, length: int, tokenizer: Tokenizer) -> int:
    """Pieces of the largest haystack that fits; the same whatever was sampled before."""

    def tokens(size: int) -> int:
        return len(tokenizer.encode(task.build(size, length, -1, 0).prompt))

    new_tokens = task.new_tokens(length)
    size, found = largest_size(tokens, task.least_size, length - new_tokens, task.most_size)
    if size < task.least_size:
        raise task.too_short(length, found + new_tokens)
    return size


@dataclass(frozen=True, kw_only=True)
class DepthTask(SizedTask):
    """One needle, asked to lie at each of some depths in turn: sample n lies at depth n mod depths.

    Attributes:
        depths: Depths at which the needle lies in turn, evenly spaced from 0 to 1; 1 puts it in
            the middle.
    """

    depths: limited(int, ge=1) = 10

    def depth(self, number: int) -> float:
        """Depth of a sample, from 0 to 1."""
        return number % self.depths / (self.depths - 1) if self.depths > 1 else 0.5
