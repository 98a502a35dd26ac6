"""The training loop."""

from mtraining_jax.training.loop.run import run

__all__ = ["run"]
