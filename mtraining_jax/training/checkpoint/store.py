"""Checkpoints: the whole state of a run, saved in the background, read back on any mesh.

A checkpoint is the folder `checkpoints/STEP` of a run. Orbax writes it under another name and
renames it when all of it is on disk, so a run killed while saving leaves no half checkpoint
behind. It holds the arrays of a `TrainState` and one JSON record: configuration, place in the
data, and a checksum of every array, since a changed byte inside a compressed array would otherwise
be read as a number.
"""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from mtraining_jax.config import Config, config_to_dict
from mtraining_jax.training.checkpoint.checksums import checksums
from mtraining_jax.training.checkpoint.reading import damaged, reads_end_together, unreadable
from mtraining_jax.training.checkpoint.same_model import check_same_model
from mtraining_jax.training.checkpoint.writing import told_once, unwritable
from mtraining_jax.training.state import TrainState


def newest_step(folder: Path) -> int | None:
    """The step of the newest whole checkpoint under `folder`; None without one."""
    if not folder.is_dir():
        return None
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    # Only what is written so: "007" or another script's digits are not folders of ours.
    steps = [int(name) for name in names if name.isdecimal() and name == str(int(name))]
    return max(steps, default=None)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they are; made if it is not there.
        keep: newest checkpoints kept; older ones are deleted.
        async_save: write in the background.
    """

    def __init__(self, folder: Path, *, keep: int, async_save: bool) -> None:
        self.folder = folder.absolute()
        # Until `close`, as arrays are written in threads that outlive a call.
        self._library = contextlib.ExitStack()
        self._library.enter_context(reads_end_together())
        self._library.enter_context(told_once())
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                enable_async_checkpointing=async_save,
                cleanup_tmp_directories=True,
            ),
        )

    def newest(self) -> int | None:
        """The step of the newest whole checkpoint; None without one."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, loader_state: Any, config: Config) -> None:
        """Saves a checkpoint, unless there is one of this step already.

        Returns when the arrays are copied, before they are on disk: the state may then be
        overwritten. All processes call it together.

        Raises:
            UserError: if this or the checkpoint before could not be written.
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
        """Reads a checkpoint.

        Args:
            step: whose checkpoint.
            abstract: shapes and shardings to read into; the mesh may be another than the one
                that saved.
            config: of this run.

        Returns:
            The state, and where the data loader stood.

        Raises:
            UserError: if the checkpoint cannot be read, is damaged, or is of another model or
                other trained parameters.
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
        """Some items of a checkpoint; a UserError if they cannot be read."""
        try:
            with reads_end_together():
                return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Orbax raises many kinds, from parsing to I/O
            raise unreadable(self.folder / str(step), error) from error

    def close(self) -> None:
        """Waits until all that was saved is on disk.

        Raises:
            UserError: if it could not be written.
        """
        try:
            with unwritable(self.folder):
                self._manager.wait_until_finished()
        finally:
            self._manager.close()
            self._library.close()


def _arrays(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
