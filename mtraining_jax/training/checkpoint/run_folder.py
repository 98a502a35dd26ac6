"""The output folder of a run: whether it is writable, what it contains, and how it was started."""

import contextlib
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import cast

import jax
from etils import epath

from mtraining_jax.config import Config
from mtraining_jax.training.checkpoint import check_intact, newest_step, saved_steps
from mtraining_jax.training.checkpoint.bucket import check_bucket
from mtraining_jax.training.checkpoint.errors import DamagedCheckpoint
from mtraining_jax.training.guard.gpus import gpus_of_host
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.version import VERSION

CHECKPOINTS_NAME = "checkpoints"
# NFS may show a new checkpoint to other hosts only after so many seconds.
_FILE_SYSTEM_DELAY = 60.0


def checkpoint_folder(config: Config) -> Path:
    """Returns the folder of the run's checkpoints; one in a bucket has the methods of a path."""
    if config.run.bucket is not None:
        return cast(Path, epath.Path(config.run.bucket) / CHECKPOINTS_NAME)
    return config.run.folder / CHECKPOINTS_NAME


def check_writable(config: Config) -> None:
    """Raises a UserError if the run cannot write its results; leaves no file behind."""
    folder = config.run.folder.absolute()
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.exists():
        raise UserError(
            f"{there} links to {os.readlink(there)}, which does not exist; create it, or set "
            "run.output_dir or run.name to another folder"
        )
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise UserError(
            f"run.output_dir = {config.run.output_dir}: the run would write into "
            f"{config.run.folder}, but {there} is not writable ({error.strerror}); set "
            "run.output_dir or run.name to another folder"
        ) from error
    if config.run.bucket is not None:
        check_bucket(config.run.bucket)


def skip_damaged(config: Config, report: Callable[[str], None]) -> None:
    """Moves checkpoints that are newer than the newest intact one into RUN_FOLDER/damaged.

    Without an intact one they stay, and resuming will report the damage.
    """
    folder, found = checkpoint_folder(config), []
    for step in saved_steps(folder):
        try:
            check_intact(folder, step)
        except DamagedCheckpoint as error:
            found.append((folder / str(step), error))
            continue
        for path, error in found:
            aside = _free(config.run.folder / "damaged" / path.name)
            aside.parent.mkdir(exist_ok=True)
            path.rename(aside)
            report(f"warning: {str(error).rpartition('; ')[0]}; it is now {aside}")
        return


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


def wait_for[T](value: T, look: Callable[[], T], seconds: float) -> T | None:
    """Waits until this process sees in a shared folder what process 0 sees; returns what it sees.

    None if `look` raises a UserError.
    """
    end = time.monotonic() + min(seconds, _FILE_SYSTEM_DELAY)
    while True:
        seen = None
        with contextlib.suppress(UserError):
            seen = look()
        if seen == value or time.monotonic() > end:
            return seen
        time.sleep(0.5)


def move_aside(config: Config) -> Path | None:
    """Renames the folder of an earlier run, if it has a checkpoint, to the next free `NAME.1`."""
    folder = config.run.folder
    if newest_step(checkpoint_folder(config)) is None:
        return None
    if config.run.bucket is not None:
        raise UserError(
            f"{config.run.bucket} has checkpoints, and a bucket cannot rename its folder; to start "
            "from scratch set another run.name"
        )
    return folder.rename(_free(folder))


def _free(path: Path) -> Path:
    """Returns the first of `NAME.1`, `NAME.2` ... that does not exist."""
    numbered = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return next(aside for aside in numbered if not aside.exists())


def record_start(config: Config, resume_from: int | None) -> None:
    """Writes config.toml, and appends the versions, command and devices of a start to starts.jsonl.

    Raises:
        UserError: if the folder is not writable.
    """
    folder, packages = config.run.folder, ("jax", "jaxlib", "flax")
    versions = {"mtraining-jax": VERSION, "python": platform.python_version()}
    start = {
        "id": uuid.uuid4().hex,  # two runs may start in the same second
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "resumed_from_step": resume_from,
        "command": shlex.join(sys.argv),
        "working_directory": str(Path.cwd()),
        "versions": versions | {name: importlib.metadata.version(name) for name in packages},
        "devices": Counter(device.device_kind for device in jax.devices()),
        "processes": jax.process_count(),
        "gpus": gpus_of_host(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
        with (folder / "starts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(start) + "\n")
    except OSError as error:
        raise UserError(f"{error.filename or folder} is not writable ({error.strerror})") from error
