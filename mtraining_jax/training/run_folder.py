"""The folder of a run: whether it can be written, and what it holds already."""

import os
import tempfile
from pathlib import Path

from mtraining_jax.config import Config
from mtraining_jax.errors import UserError
from mtraining_jax.training.checkpoint import newest_step

CHECKPOINTS_NAME = "checkpoints"


def checkpoint_folder(config: Config) -> Path:
    """Where the run keeps its checkpoints."""
    return config.run.folder / CHECKPOINTS_NAME


def check_writable(config: Config) -> None:
    """Stops a run that could not write its results; leaves nothing behind.

    Raises:
        UserError: if the folder, or the nearest one above that exists, cannot be written.
    """
    folder = config.run.folder
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise UserError(
            f"run.output_dir = {config.run.output_dir}: the run writes into {folder}, and {there} "
            f"cannot be written ({error.strerror}); choose another run.output_dir"
        ) from error


def resume_step(config: Config) -> int | None:
    """The step of the checkpoint that the run resumes from; None to start anew.

    It may be `run.steps` or later: then nothing is left to do.

    Raises:
        UserError: if the configuration demands a checkpoint and there is none.
    """
    if config.checkpoint.resume is False:
        return None
    step = newest_step(checkpoint_folder(config))
    if step is None and config.checkpoint.resume is True:
        raise UserError(
            f"checkpoint.resume = true, but {checkpoint_folder(config)} has no checkpoint; set it "
            'to "auto" to start anew in this case'
        )
    return step


def move_aside(config: Config) -> Path | None:
    """Renames what an earlier run of this name wrote, when a run starts anew over it.

    Returns:
        The new folder, `NAME.1` or the next that is free; None if there was no checkpoint.
    """
    folder = config.run.folder
    if newest_step(checkpoint_folder(config)) is None:
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    os.rename(folder, aside)
    return aside
