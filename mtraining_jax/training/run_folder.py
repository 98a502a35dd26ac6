"""The folder of a run: can it be written, and what does it hold already."""

import os
import tempfile
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from mtraining_jax.config import Config
from mtraining_jax.errors import UserError
from mtraining_jax.training.checkpoint import newest_step

CHECKPOINTS_NAME = "checkpoints"
COMPILED_NAME = "compiled"


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


def use_compile_cache(config: Config) -> None:
    """Keeps compiled programs for later starts, where the configuration says.

    On GPUs the timings by which XLA chooses among kernels are kept beside them. Of several
    processes the first writes, and all read.

    Raises:
        UserError: if the folder cannot be written.
    """
    folder = config.run.compile_cache_dir
    if folder == "auto":
        # Programs of a CPU are for just its kind, which a shared folder may not always meet.
        on_gpu = jax.default_backend() == "gpu"
        folder = str(Path(config.run.output_dir) / COMPILED_NAME) if on_gpu else "never"
    if folder == "never":
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"run.compile_cache_dir = {folder} cannot be written ({error.strerror})"
        ) from error
    jax.config.update("jax_compilation_cache_dir", folder)
    # All of them: by default JAX leaves out what compiles in less than a second, dozens at a start.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # Programs compiled before would otherwise have settled that there is no cache.
    compilation_cache.reset_cache()


def resume_step(config: Config) -> int | None:
    """The step of the checkpoint that the run goes on from; None to start anew.

    Raises:
        UserError: if the configuration demands a checkpoint and there is none, or there is one
            of a later step than the run has.
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
