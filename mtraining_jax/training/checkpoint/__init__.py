"""Checkpoints of the full training state: saved in the background, restored on any mesh."""

from mtraining_jax.training.checkpoint.store import (
    Checkpoints,
    newest_step,
    read_parameters,
    read_record,
    read_state,
)

__all__ = ["Checkpoints", "newest_step", "read_parameters", "read_record", "read_state"]
