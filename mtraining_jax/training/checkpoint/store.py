"""Checkpoints of the full training state: saved in the background, restored on any mesh.

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
from mtraining_jax.training.checkpoint.orbax_errors import print_errors_once
from mtraining_jax.training.checkpoint.reading import damaged, unreadable
from mtraining_jax.training.checkpoint.same_model import check_same_model
from mtraining_jax.training.checkpoint.writing import unwritable
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
    """The checkpoints of one run.

    Args:
        folder: their folder, created if missing.
        keep: number of newest checkpoints to keep; older ones are deleted.
        async_save: whether to write in the background.
    """

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
        """Returns the step of the newest complete checkpoint; None without one."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, loader_state: Any, config: Config) -> None:
        """Saves a checkpoint, unless this step already has one; all processes call it together.

        Returns when the arrays are copied, before they are on disk; the state may then be donated.

        Raises:
            UserError: if this or the previous checkpoint could not be written.
        """
        if self.newest() == step:
            return
        arrays = _arrays(state)
        record = {
            "config": config_to_dict(config),
            "loader": loader_state,
            "shapes": {name: list(x.shape) for name, x in state.parameters.items()},
            "checksums": checksums(arrays),
        }
        with unwritable(self.folder):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    arrays=ocp.args.StandardSave(arrays), record=ocp.args.JsonSave(record)
                ),
            )

    def restore(
        self, step: int, abstract: TrainState, config: Config
    ) -> tuple[TrainState, dict[str, Any]]:
        """Reads the state and the position of the data loader.

        Args:
            step: step of the checkpoint.
            abstract: shapes and shardings to restore; the mesh may differ from that of the save.
            config: configuration of this run.

        Raises:
            UserError: if the checkpoint is unreadable or damaged, or has another model or other
                trained parameters.
        """
        path = self.folder / str(step)
        record = self._read(step, record=ocp.args.JsonRestore()).record
        try:
            saved, loader_state = record["config"], record["loader"]
            shapes, sums = record["shapes"], record["checksums"]
        except (KeyError, TypeError) as error:
            raise damaged(path, "its record is incomplete") from error
        check_same_model(path, saved, shapes, abstract, config)
        arrays = self._read(step, arrays=ocp.args.StandardRestore(_arrays(abstract))).arrays
        for name, number in checksums(arrays).items():
            if sums.get(name) != number:
                raise damaged(path, f"the checksum of {name} does not match")
        return TrainState(**arrays), loader_state

    def _read(self, step: int, **items: Any) -> Any:
        """Reads some items of a checkpoint; raises a UserError if that fails."""
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Orbax raises many types, for parsing and I/O
            raise unreadable(self.folder / str(step), error) from error

    def close(self) -> None:
        """Waits until all checkpoints are on disk; raises a UserError if a write failed."""
        try:
            with unwritable(self.folder):
                self._manager.wait_until_finished()
        finally:
            self._manager.close()


def _arrays(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
