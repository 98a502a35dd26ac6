"""Tasks with generated prompts: a haystack of as many pieces as fit the length."""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.evaluation.tasks.task import Sample, Task
from mtraining_jax.evaluation.tasks.tokens import largest_size
from mtraining_jax.utils.limits import PositiveInt, check_limits


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The text of a sample before its length is checked; see `Task.text_sample`."""

    prompt: str
    references: tuple[str, ...]
    answer: str | None = None
    given: str = ""
    depth: float | None = None


@dataclass(frozen=True, kw_only=True)
class SizedTask(Task):
    """Base class of tasks with a haystack; derived classes implement `build`.

    The haystack size is computed once per length and tokenizer, with a sample that is not used
    otherwise. A sample that turns out longer than that one gets a smaller haystack.

    Attributes:
        max_new_tokens: maximum number of answer tokens.
        least_size, most_size: number of pieces of the smallest and largest haystack.
    """

    max_new_tokens: ClassVar[int]
    least_size: ClassVar[int] = 1
    most_size: ClassVar[int] = 2**30

    def __post_init__(self) -> None:
        check_limits(self)

    def new_tokens(self, length: int) -> int:
        return self.max_new_tokens

    def build(self, size: int, length: int, number: int, seed: int) -> Draft:
        """Builds the text of a sample with `size` pieces; the number -1 measures sizes."""
        raise NotImplementedError(f"{type(self).__name__}.build")

    def sample(self, length: int, number: int, seed: int, tokenizer: Tokenizer | None) -> Sample:
        assert tokenizer is not None  # this task needs one
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
    """Returns the size of the largest haystack that fits, independent of earlier samples."""

    def tokens(size: int) -> int:
        return len(tokenizer.encode(task.build(size, length, -1, 0).prompt))

    new_tokens = task.new_tokens(length)
    size, found = largest_size(tokens, task.least_size, length - new_tokens, task.most_size)
    if size < task.least_size:
        raise task.too_short(length, found + new_tokens)
    return size


@dataclass(frozen=True, kw_only=True)
class DepthTask(SizedTask):
    """One needle at evenly spaced depths: sample n has depth number n mod depths.

    Attributes:
        depths: Number of needle depths, evenly spaced from 0 to 1; 1 puts the needle in the
            middle.
    """

    depths: PositiveInt = 10

    def depth(self, number: int) -> float:
        return number % self.depths / (self.depths - 1) if self.depths > 1 else 0.5
