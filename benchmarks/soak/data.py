"""The data of a soaked run: a file of token ids."""

import functools
from pathlib import Path

import numpy as np

VOCAB = 512


@functools.cache
def _tokens(tokens: int, seed: int) -> np.ndarray:
    """Token ids of which each follows from the one before, mostly: easy to learn."""
    rng = np.random.default_rng(seed)
    follows = rng.permutation(VOCAB).astype(np.uint16)
    surprises = rng.random(tokens) < 0.1
    drawn = rng.integers(VOCAB, size=tokens)
    found = np.empty(tokens, np.uint16)
    token = 0
    for i in range(tokens):
        token = drawn[i] if surprises[i] else follows[token]
        found[i] = token
    return found


def make_data(path: Path, tokens: int, seed: int) -> None:
    """Puts a file of token ids in place of another at once; who reads the other one still can."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new.npy")
    np.save(new, _tokens(tokens, seed))
    new.replace(path)
