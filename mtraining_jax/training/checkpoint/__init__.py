"""Checkpoints: the whole state of a run, saved in the background, read back on any mesh."""

from mtraining_jax.training.checkpoint.store import Checkpoints, newest_step

__all__ = ["Checkpoints", "newest_step"]
