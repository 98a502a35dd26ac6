"""Decides when to save the state of a run."""

from pathlib import Path
from typing import Any

from mtraining_jax.config import Config
from mtraining_jax.training.checkpoint import Checkpoints, run_folder
from mtraining_jax.training.state import TrainState


class Saving:
    """The checkpoints of a run, according to the `checkpoint` section."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._checkpoints = Checkpoints(
            run_folder.checkpoint_folder(config),
            keep=config.checkpoint.keep,
            async_save=config.checkpoint.async_save,
        )

    @property
    def ever(self) -> bool:
        """Whether the run saves checkpoints at all."""
        return bool(self._config.checkpoint.interval) or self._config.checkpoint.last_step

    def is_due(self, step: int) -> bool:
        """Whether the state after this step is saved."""
        checkpoint = self._config.checkpoint
        if step == self._config.run.steps and checkpoint.last_step:
            return True
        return bool(checkpoint.interval) and step % checkpoint.interval == 0

    def path(self, step: int) -> Path:
        """Returns the folder of a step's checkpoint."""
        return self._checkpoints.folder / str(step)

    def newest(self) -> int | None:
        """Returns the step of the newest complete checkpoint; None without one."""
        return self._checkpoints.newest()

    def save(self, step: int, state: TrainState, place: Any) -> None:
        """Saves a state and its position in the data; see `Checkpoints.save`."""
        self._checkpoints.save(step, state, place, self._config)

    def restore(self, step: int, abstract: TrainState) -> tuple[TrainState, Any]:
        """Reads a state and its position in the data; see `Checkpoints.restore`."""
        return self._checkpoints.restore(step, abstract, self._config)

    def close(self) -> None:
        """Waits until all checkpoints are on disk; see `Checkpoints.close`."""
        self._checkpoints.close()
