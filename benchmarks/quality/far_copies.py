"""Finds tokens of a sequence that repeat a distant earlier passage."""

import numpy as np


def far_copies(tokens: np.ndarray, gram: int = 4, near: int = 256) -> np.ndarray:
    """Returns which tokens are far copies, bool [S].

    The n-gram of a token is the token and those before it, `gram` in all. A far copy has an n-gram
    that occurred earlier, the last time more than `near` tokens back: a window does not show it.
    """
    found = np.zeros(len(tokens), bool)
    if len(tokens) < gram:
        return found
    grams = np.lib.stride_tricks.sliding_window_view(tokens, gram)
    _, kind = np.unique(grams, axis=0, return_inverse=True)
    order = np.argsort(kind.ravel(), kind="stable")  # equal n-grams adjacent, in sequence order
    again = kind.ravel()[order][1:] == kind.ravel()[order][:-1]
    found[gram - 1 + order[1:]] = again & (np.diff(order) > near)
    return found
