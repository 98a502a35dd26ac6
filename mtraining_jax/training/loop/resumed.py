"""Lines that a resumed run prints about what differs from its checkpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mtraining_jax.config import Config
from mtraining_jax.training.checkpoint.same_model import changed_fields
from mtraining_jax.training.optimizer import make_schedule


def resume_notes(path: Path, saved: dict[str, Any], config: Config, step: int) -> Iterator[str]:
    """Yields lines about a run that resumes after `step`, with a checkpoint's `saved` fields.

    The loader and `check_same_model` already refused other data, another batch and another model.
    """
    before = Config.from_record(saved, str(path))
    if changed := changed_fields(path, saved, config):
        yield "options that differ from those of the checkpoint:"
        yield from (f"  {sentence}" for sentence in changed)
    old, new = (make_schedule(x.optimizer, x.run.steps) for x in (before, config))
    last, planned, rate = (float(x) for x in (old(step - 1), old(step), new(step)))
    if not np.isclose(rate, planned, rtol=1e-4, atol=0):
        text = (
            f"note: the learning rate was {last:.2e} in step {step} and is {rate:.2e} in step "
            f"{step + 1}, where the schedule of the checkpoint has {planned:.2e}"
        )
        end = before.optimizer.decay_steps or before.run.steps
        if before.optimizer.schedule != "constant" and end <= step and planned:
            text += f"; optimizer.decay_steps={end} keeps that"
        elif rate > last:
            text += "; optimizer.lr and optimizer.schedule set a lower one"
        yield text
    dense = config.sparsity.dense_cooldown_steps
    taken = step > before.run.steps - before.sparsity.dense_cooldown_steps
    if dense and taken and config.run.steps > before.run.steps:
        yield (
            f"note: the steps of the dense cooldown (sparsity.dense_cooldown_steps = {dense}) are "
            f"again the last ones, from step {config.run.steps - dense + 1} on"
        )
