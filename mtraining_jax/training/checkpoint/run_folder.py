"""The output folder of a run: whether it is writable, and what it already contains."""

import os
import tempfile
import time
from pathlib import Path

from mtraining_jax.config import Config
from mtraining_jax.training.checkpoint import newest_step
from mtraining_jax.utils.errors import UserError

CHECKPOINTS_NAME = "checkpoints"
_FILE_SYSTEM_DELAY = 60.0  # seconds, the longest attribute cache of NFS by default


def checkpoint_folder(config: Config) -> Path:
    """Returns the folder of the run's checkpoints."""
    return config.run.folder / CHECKPOINTS_NAME


def check_writable(config: Config) -> None:
    """Raises a UserError if the run cannot write its results; leaves no file behind."""
    folder = config.run.folder
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise UserError(
            f"run.output_dir = {config.run.output_dir}: the run would write into {folder}, but "
            f"{there} is not writable ({error.strerror}); set run.output_dir to another folder"
        ) from error


def resume_step(config: Config) -> int | None:
    """Returns the step of the checkpoint to resume from; None to start from scratch."""
    if config.checkpoint.resume is False:
        return None
    step = newest_step(checkpoint_folder(config))
    if step is None and config.checkpoint.resume is True:
        raise UserError(
            f"checkpoint.resume = true, but {checkpoint_folder(config)} has no checkpoint; use "
            'checkpoint.resume = "auto" to start from scratch in this case'
        )
    return step


def wait_for_resume_step(config: Config, step: int | None, seconds: float) -> int | None:
    """Waits until this process sees the resume step of process 0; returns the one it sees.

    Network file systems may show a new checkpoint to other hosts only after a minute.
    """
    end = time.monotonic() + min(seconds, _FILE_SYSTEM_DELAY)
    while True:
        try:
            found = resume_step(config)
        except UserError:
            found = None
        if found == step or time.monotonic() > end:
            return found
        time.sleep(0.5)


def move_aside(config: Config) -> Path | None:
    """Renames the folder of an earlier run of this name, when a run starts from scratch.

    Returns the new folder, `NAME.1` or the next free number; None if it had no checkpoint.
    """
    folder = config.run.folder
    if newest_step(checkpoint_folder(config)) is None:
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    os.rename(folder, aside)
    return aside
