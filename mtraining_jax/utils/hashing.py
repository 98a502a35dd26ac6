"""Pseudorandom bits as a function of position: the same on every rank and machine."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jax import Array


def mixed(x: "Array") -> "Array":
    """Hashes uint32 so that every output bit depends on all input bits."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * np.uint32(factor)
    return x ^ (x >> 16)
