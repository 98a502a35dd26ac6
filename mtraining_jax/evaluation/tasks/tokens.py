"""Token ids of a continuation, and the largest text that fits a length."""

from collections.abc import Callable

import numpy as np

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.utils.errors import UserError

# Last characters of a prompt that affect the tokens of a continuation.
_TAIL = 64
# Maximum number of times that a text is tokenized to find its size.
_MOST_COUNTS = 18


def continuation_ids(tokenizer: Tokenizer, prompt: str, answer: str) -> np.ndarray:
    """Returns the token ids of an answer after a prompt, int32 [m].

    It reads only the end of the prompt. Raises UserError if the tokenizer merges that with the
    start of the answer, so that the answer has no separate tokens.
    """
    tail = prompt[-_TAIL:]
    before = tokenizer.encode(tail)
    both = tokenizer.encode(tail + answer)
    if len(both) <= len(before) or not np.array_equal(both[: len(before)], before):
        raise UserError(
            f'the tokenizer {tokenizer.name} gives "{answer}" no separate token ids after '
            f'"{tail[-16:]}"; score generated answers instead (--generate)'
        )
    return np.asarray(both[len(before) :], np.int32)


def largest_size(
    count: Callable[[int], int], least: int, limit: int, most: int = 2**30
) -> tuple[int, int]:
    """Finds the largest size of a text within a token limit, by the method of false position.

    Counts grow almost in proportion to the size, so a few calls of `count` are enough, and only the
    last few have large sizes. The search stops when less than one unit of average size is left, or
    less than one part in 2000 of the limit, or after `_MOST_COUNTS` calls.

    Returns:
        The size and its count; or least - 1 and the count of the smallest size if that is already
        too large.
    """
    low, low_count = least, count(least)
    if low_count > limit:
        return least - 1, low_count
    high = most + 1  # smallest size that is too large
    size = low + 16
    for _ in range(_MOST_COUNTS - 1):
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
