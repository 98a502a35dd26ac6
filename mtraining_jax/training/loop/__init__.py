"""The loop: a whole run, its steps, and what happens at each of them."""

from mtraining_jax.training.loop.run import run

__all__ = ["run"]
