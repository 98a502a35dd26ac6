"""The checkpoints of a run: when they are written, where, and what they hold next to arrays.

Also the lines that a resumed run prints about what differs from its checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from mtraining_jax.callbacks import Callback
from mtraining_jax.config import Config
from mtraining_jax.training.checkpoint import Checkpoints, read_state, run_folder
from mtraining_jax.training.checkpoint.local import open_local, read_local_state
from mtraining_jax.training.checkpoint.same_model import changed_fields
from mtraining_jax.training.loop.watchdog import HangWatchdog
from mtraining_jax.training.optimizer import make_schedule
from mtraining_jax.training.state import StateBuilder, TrainState
from mtraining_jax.utils.errors import UserError


class Saving:
    """Writes and reads the checkpoints of a run, those of the run folder and local ones.

    `opened` waits for the last one at the end.
    """

    def __init__(
        self, config: Config, resume_from: int | None, watchdog: HangWatchdog, opened: ExitStack
    ) -> None:
        self._config, self._watchdog = config, watchdog
        how = {"keep": config.checkpoint.keep, "async_save": config.checkpoint.async_save}
        self._checkpoints = Checkpoints(run_folder.checkpoint_folder(config), **how)
        opened.callback(self._close)
        self._local: Checkpoints | None = None
        if config.checkpoint.local_dir is not None:
            self._local = opened.enter_context(closing(open_local(config, resume_from)))

    def restore(
        self, builder: StateBuilder, step: int, say: Callable[..., None]
    ) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state of a step, and what `save` got next to it."""
        folder, is_local = self._checkpoints.folder, step != self._checkpoints.newest()
        with self._watchdog.watch(f"reading the checkpoint of step {step}"):
            abstract, base = builder.abstract(), builder.base
            if is_local:
                state, record = read_local_state(self._config, step, abstract, base)
            else:
                state, record = read_state(folder, step, abstract, self._config, base)
        where = " in checkpoint.local_dir" if is_local else ""
        say(f"resuming from the checkpoint of step {step}{where}")
        say(*resume_notes(folder / str(step), record["config"], self._config, step))
        return state, record["loader"]

    @property
    def saves(self) -> bool:
        """Whether the run writes checkpoints."""
        return bool(self._config.checkpoint.interval) or self._config.checkpoint.last_step

    def is_due(self, step: int) -> bool:
        """Whether to write a checkpoint into the run folder after a step."""
        checkpoint = self._config.checkpoint
        if step == self._config.run.steps and checkpoint.last_step:
            return True
        return bool(checkpoint.interval) and step % checkpoint.interval == 0

    def is_due_locally(self, step: int) -> bool:
        return self._local is not None and step % self._config.checkpoint.local_interval == 0

    def save(self, step: int, state: TrainState, extras: Mapping[str, Any], *, local: bool) -> None:
        """Saves a checkpoint; returns when the state may be donated."""
        checkpoints = self._local if local else self._checkpoints
        assert checkpoints is not None
        # Writing may be slow. If a process is lost meanwhile, the others notice it.
        with self._watchdog.watch("writing the previous checkpoint", limited=False):
            checkpoints.wait()
        limited = self._config.checkpoint.async_save
        with self._watchdog.watch(f"saving the checkpoint of step {step}", limited=limited):
            checkpoints.save(step, state, extras, self._config)

    def place(self, step: int) -> str:
        """Folder of the checkpoint of a step."""
        return str(self._checkpoints.folder / str(step))

    def newest(self, waits: bool) -> int | None:
        """Newest step with a checkpoint; `waits`: also those that are still being written."""
        both = [x for x in (self._checkpoints, self._local) if x is not None]
        steps = [x.newest() if waits else x.newest_complete() for x in both]
        return max((step for step in steps if step is not None), default=None)

    def _close(self) -> None:
        with self._watchdog.watch("writing the last checkpoint", limited=False):
            self._checkpoints.close()


def by_key(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Callbacks that keep something in checkpoints, by attribute `key` or the name of their class.

    Raises:
        UserError: two callbacks have the same key.
    """
    found: dict[str, Callback] = {}
    for callback in callbacks:
        if type(callback).save is Callback.save:
            continue
        kind = type(callback)
        key = getattr(callback, "key", f"{kind.__module__}.{kind.__qualname__}")
        if key in found:
            raise UserError(
                f"two callbacks of type {kind.__name__} would save under {key!r}: give each its "
                "own attribute `key`"
            )
        found[key] = callback
    return found


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
