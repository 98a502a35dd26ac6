"""Saves checkpoints of the full training state in the background.

A checkpoint is the folder `checkpoints/STEP` of a run. Orbax writes it under a temporary name and
renames it when it is complete, so a killed run leaves no partial checkpoint. It contains the arrays
of a `TrainState` and one JSON record with the configuration, the position in the data, and a
checksum of every array.
"""

import dataclasses
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from mtraining_jax.config import Config, config_to_dict
from mtraining_jax.training.checkpoint.checksums import checksums
from mtraining_jax.training.checkpoint.errors import writing_into
from mtraining_jax.training.checkpoint.orbax_errors import print_errors_once
from mtraining_jax.training.state import TrainState


def newest_step(folder: Path) -> int | None:
    """Returns the step of the newest complete checkpoint in `folder`; None without one."""
    if not folder.is_dir():
        return None
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    # Canonical names only: "007" or digits of another script are not checkpoints.
    steps = [int(name) for name in names if name.isdecimal() and name == str(int(name))]
    return max(steps, default=None)


class Checkpoints:
    """Writes the checkpoints of one run into `folder`, which keeps the newest `keep` of them."""

    def __init__(self, folder: Path, *, keep: int, async_save: bool) -> None:
        self.folder = folder.absolute()
        print_errors_once()
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                enable_async_checkpointing=async_save,
                cleanup_tmp_directories=True,
            ),
        )

    def newest(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, loader_state: Any, config: Config) -> None:
        """Saves a checkpoint, unless this step already has one; all processes call it together.

        Returns when the arrays are copied, before they are on disk; the state may then be donated.
        Raises a UserError if this or the previous checkpoint could not be written.
        """
        if self.newest() == step:
            return
        arrays = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        record = {
            "config": config_to_dict(config),
            "loader": loader_state,
            "shapes": {name: list(x.shape) for name, x in state.parameters.items()},
            "checksums": checksums(arrays),
        }
        items = ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays), record=ocp.args.JsonSave(record)
        )
        with writing_into(self.folder):
            self._manager.save(step, args=items)

    def close(self) -> None:
        """Waits until all checkpoints are on disk; raises a UserError if a write failed."""
        try:
            with writing_into(self.folder):
                self._manager.wait_until_finished()
        finally:
            self._manager.close()
