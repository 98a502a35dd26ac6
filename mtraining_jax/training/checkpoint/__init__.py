"""Checkpoints of the full training state: saved in the background, restored on any mesh."""

from mtraining_jax.training.checkpoint.store import (
    Checkpoints,
    check_intact,
    newest_step,
    read_parameters,
    read_record,
    read_state,
    saved_steps,
)

__all__ = [
    "Checkpoints",
    "check_intact",
    "newest_step",
    "read_parameters",
    "read_record",
    "read_state",
    "saved_steps",
]
