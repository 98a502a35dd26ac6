"""Tasks with generated prompts: a haystack of as many pieces as fit the length."""

import functools
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.tools.evaluate.tasks.metrics import fraction_found
from mtraining_jax.tools.evaluate.tasks.task import Sample, Task
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import PositiveInt

# Maximum number of times that a text is tokenized to find its size.
_MAX_COUNTS = 18


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The text of a sample before its length is checked; see `Task.text_sample`."""

    prompt: str
    references: tuple[str, ...]
    answer: str | None = None
    given: str = ""
    depth: float | None = None


@options(kw_only=True)
class SizedTask(Task):
    """Base class of tasks with a haystack of `min_size` to `max_size` pieces.

    The haystack size is computed once per length and tokenizer, with a sample that is not used
    otherwise. A sample that turns out longer than that one gets a smaller haystack.
    """

    max_new_tokens: ClassVar[int]
    min_size: ClassVar[int] = 1
    max_size: ClassVar[int] = 2**30

    def build(self, size: int, length: int, number: int, seed: int) -> Draft:
        """Builds the text of a sample with `size` pieces; the number -1 measures sizes."""
        raise NotImplementedError(f"{type(self).__name__}.build")

    def check_length(
        self, length: int, samples: int, seed: int, tokenizer: Tokenizer | None
    ) -> None:
        assert tokenizer is not None
        for number in range(-1, samples):
            prompt = self.build(self.min_size, length, number, seed).prompt
            smallest = len(tokenizer.encode(prompt)) + self.max_new_tokens
            if smallest > length:
                raise self.too_short(length, smallest)
            if number < 0 and 2 * smallest <= length:  # others are not twice as long
                return

    def sample(self, length: int, number: int, seed: int, tokenizer: Tokenizer | None) -> Sample:
        assert tokenizer is not None
        size = _size(self, length, tokenizer)
        while True:
            draft = self.build(size, length, number, seed)
            ids = tokenizer.encode(draft.prompt)
            excess = len(ids) + self.max_new_tokens - length
            if excess <= 0 or size <= self.min_size:
                break
            size = max(self.min_size, size - math.ceil(excess * size / len(ids)))
        return self.text_sample(
            tokenizer,
            prompt_ids=ids,
            length=length,
            number=number,
            max_new_tokens=self.max_new_tokens,
            **vars(draft),
        )

    def score(self, sample: Sample, answer_text: str) -> float:
        return fraction_found(answer_text, sample.references)


@options(kw_only=True)
class DepthTask(SizedTask):
    """One needle at evenly spaced depths; a few samples cover the whole range."""

    depths: PositiveInt = 10
    """Number of needle depths, evenly spaced from 0 to 1; 1 puts the needle in the middle."""

    def depth(self, number: int) -> float:
        """The depth of a sample, whatever the number of samples: the first two are at the ends."""
        if self.depths == 1:
            return 0.5
        return _spread_order(self.depths)[number % self.depths] / (self.depths - 1)


@functools.lru_cache(maxsize=8)
def _spread_order(count: int) -> tuple[int, ...]:
    """The numbers 0 to `count` - 1 >= 1: both ends, then always the middle of the largest gap."""
    order, gaps = [0, count - 1], [(1 - count, 0, count - 1)]
    while len(order) < count:
        _, low, high = heapq.heappop(gaps)
        order.append(middle := (low + high) // 2)
        for a, b in (low, middle), (middle, high):
            heapq.heappush(gaps, (a - b, a, b))
    return tuple(order)


@functools.lru_cache(maxsize=256)
def _size(task: SizedTask, length: int, tokenizer: Tokenizer) -> int:
    """Returns the size of the largest haystack that fits, independent of earlier samples."""

    def tokens(size: int) -> int:
        return len(tokenizer.encode(task.build(size, length, -1, 0).prompt))

    size, found = largest_size(tokens, task.min_size, length - task.max_new_tokens, task.max_size)
    if size < task.min_size:
        raise task.too_short(length, found + task.max_new_tokens)
    return size


def largest_size(
    count: Callable[[int], int], smallest: int, limit: int, largest: int = 2**30
) -> tuple[int, int]:
    """Finds the largest size of a text within a token limit, by the method of false position.

    The search stops when less than one unit of average size is left, or one part in 2000 of the
    limit. Returns the size and its count; `smallest` - 1 and its count if that is too large.
    """
    low, low_count = smallest, count(smallest)
    if low_count > limit:
        return smallest - 1, low_count
    high = largest + 1  # smallest size that is too large
    size = low + 16
    for _ in range(_MAX_COUNTS - 1):
        size = max(low + 1, min(size, high - 1))
        if size >= high:
            break
        tokens = count(size)
        per_unit = max((tokens - low_count) / (size - low), 1e-9)
        if tokens <= limit:
            low, low_count = size, tokens
        else:
            high = size
        if limit - low_count < max(per_unit, limit / 2000):
            break
        # A small text predicts little about a large one: grow at most 32 times per call.
        size = min(low + int((limit - low_count) / per_unit), 32 * low + 64)
    return low, low_count
