"""A pattern that cannot choose."""

import dataclasses

from mtraining_jax.patterns.base import Pattern


@dataclasses.dataclass(frozen=True)
class Broken(Pattern):
    block_size: int = 128

    def select(self, q, k, context):
        raise ValueError("there is nothing to choose")
