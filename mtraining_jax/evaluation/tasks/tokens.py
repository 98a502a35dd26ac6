"""Token counts: ids of a continuation, and the largest text that fits a length."""

from collections.abc import Callable

import numpy as np

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.errors import UserError

# Characters of a prompt's end that decide how a continuation is cut into tokens.
_TAIL = 64
# Most times that a text is tokenised to find its size.
_MOST_COUNTS = 18


def continuation_ids(tokenizer: Tokenizer, prompt: str, answer: str) -> np.ndarray:
    """Token ids of an answer where it follows a prompt: int32 [m].

    Only the end of the prompt is looked at, so a long prompt is not tokenised again.

    Raises:
        UserError: the tokenizer joins the prompt's end and the answer's begin into one token, so
            that the answer has no tokens of its own.
    """
    tail = prompt[-_TAIL:]
    before = tokenizer.encode(tail)
    both = tokenizer.encode(tail + answer)
    if len(both) <= len(before) or not np.array_equal(both[: len(before)], before):
        raise UserError(
            f'"{answer}" has no token ids of its own after "{tail[-16:]}" with the tokenizer '
            f"{tokenizer.name}; score generated answers instead"
        )
    return np.asarray(both[len(before) :], np.int32)


def largest_size(
    count: Callable[[int], int], least: int, limit: int, most: int = 2**30
) -> tuple[int, int]:
    """The largest size of a text whose token count is within a limit, by false position.

    Counts grow nearly in proportion to the size. So a handful of calls is enough, and only the
    last few are of large sizes. It stops where less than one unit of average size is left, or
    less than one part in 2000 of the limit, or after `_MOST_COUNTS` calls.

    Args:
        count: tokens of a text of a size; must not fall as the size grows.
        least: the smallest size.
        limit: most tokens.
        most: the largest size there is.

    Returns:
        The size, or least - 1 if even the smallest is too large, and its count (that of the
        smallest where that is too large).
    """
    low, low_count = least, count(least)
    if low_count > limit:
        return least - 1, low_count
    high = most + 1  # sizes from here on are too large
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
        # A small text says little about a large one: no more than 32 times its size at once.
        size = min(low + int((limit - low_count) / per_unit), 32 * low + 64)
    return low, low_count
