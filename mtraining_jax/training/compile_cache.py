"""Compiled programs that are kept for later starts."""

import tempfile
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from mtraining_jax.config import Config
from mtraining_jax.errors import UserError

_FOLDER_NAME = "compiled"


def use_compile_cache(config: Config) -> None:
    """Keeps compiled programs for later starts, where the configuration says.

    On GPUs the timings by which XLA chooses among kernels are kept as well. Of several
    processes the first writes, and all read.

    Raises:
        UserError: if the folder cannot be written.
    """
    folder = config.run.compile_cache_dir
    if folder == "auto":
        # Programs compiled for one kind of CPU may not run on others that share the folder.
        on_gpu = jax.default_backend() == "gpu"
        folder = str(Path(config.run.output_dir) / _FOLDER_NAME) if on_gpu else "never"
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
    # By default JAX leaves out programs that compile in less than a second, dozens at a start.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # Programs compiled before would otherwise have settled that there is no cache.
    compilation_cache.reset_cache()
