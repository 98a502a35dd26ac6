"""Former place of `mtraining_jax.utils.limits`."""

from mtraining_jax.utils.limits import Text, TextList

__all__ = ["Text", "TextList"]
