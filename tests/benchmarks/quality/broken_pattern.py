"""A pattern that cannot choose."""

from mtraining_jax.patterns.base import Pattern
from mtraining_jax.utils.fields import options


@options
class Broken(Pattern):
    block_size: int = 128

    def select(self, q, k, context):
        raise ValueError("there is nothing to choose")
