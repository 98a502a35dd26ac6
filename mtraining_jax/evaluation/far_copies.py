"""Which tokens of a sequence repeat something that stands far back."""

import numpy as np

GRAM = 4  # tokens that must stand there again
NEAR = 256  # tokens: what stands again within them is not far


def far_copies(tokens: np.ndarray, gram: int = GRAM, near: int = NEAR) -> np.ndarray:
    """Whether each token is a far copy.

    A token's gram is itself with the tokens before it, `gram` in all. The token is a far copy if
    its gram stood earlier in the sequence and the latest such place is more than `near` tokens
    back. To predict it a model needs keys that a window of `near` tokens does not have.

    Args:
        tokens: integers [S].
        gram: tokens of a gram.
        near: see above.

    Returns:
        Bool [S]. The first tokens, which have no whole gram, are none.
    """
    found = np.zeros(len(tokens), bool)
    if len(tokens) < gram:
        return found
    grams = np.lib.stride_tricks.sliding_window_view(tokens, gram)
    _, kind = np.unique(grams, axis=0, return_inverse=True)
    order = np.argsort(kind.ravel(), kind="stable")  # equal grams side by side, in their order
    again = kind.ravel()[order][1:] == kind.ravel()[order][:-1]
    found[gram - 1 + order[1:]] = again & (np.diff(order) > near)
    return found
