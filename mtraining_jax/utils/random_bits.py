"""Counter-based random numbers, identical on all ranks, machines and versions."""

from collections.abc import Sequence
from typing import Any

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = 2**64 - 1


def hash_uint64(x: np.ndarray) -> np.ndarray:
    """Hashes uint64 counters: the finalizer of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash_uint32(x: Any) -> Any:
    """Hashes an array of uint32, of NumPy or JAX: every output bit depends on all input bits."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * np.uint32(factor)
    return x ^ (x >> 16)


class Stream:
    """A stream of random numbers.

    Number i of stream s is mix(mix(seed * G + s) + (i + 1) * G) mod 2^64, where mix is the
    finalizer of SplitMix64 and G its increment. The seed is any integer.
    """

    def __init__(self, seed: int, stream: int = 0):
        start = np.array([(seed * int(GOLDEN) + stream) & _MASK], np.uint64)
        self._start, self._drawn = hash_uint64(start), 0

    def bits(self, count: int) -> np.ndarray:
        """The next numbers: uint64 [count]."""
        counters = np.arange(self._drawn + 1, self._drawn + 1 + count, dtype=np.uint64)
        self._drawn += count
        return hash_uint64(self._start + counters * GOLDEN)

    def below_each(self, limits: np.ndarray) -> np.ndarray:
        """A number below each limit: int64 [n]; limits [n] are from 1 to 2^32 - 1."""
        limits = np.asarray(limits, np.uint64)
        high = self.bits(limits.size) >> np.uint64(32)
        return (high * limits >> np.uint64(32)).astype(np.int64)

    def below(self, limit: int) -> int:
        """One number from 0 to limit - 1."""
        return int(self.below_each(np.array([limit]))[0])

    def sample(self, n: int, count: int) -> list[int]:
        """Draws `count` of 0 to n - 1 without replacement (Fisher-Yates, in O(count) memory)."""
        if count > n:
            raise ValueError(f"count={count} must not exceed n={n}")
        swaps = np.arange(count) + self.below_each(n - np.arange(count))
        moved: dict[int, int] = {}
        drawn = []
        for i, j in enumerate(swaps.tolist()):
            drawn.append(moved.get(j, j))
            moved[j] = moved.get(i, i)
        return drawn

    def order(self, n: int) -> np.ndarray:
        """A random permutation of 0 to n - 1: int64 [n]."""
        return np.argsort(self.bits(n), kind="stable")

    def choose(self, items: Sequence[Any]) -> Any:
        """A random item."""
        return items[self.below(len(items))]
