"""The persistent compilation cache of a run."""

import tempfile
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from mtraining_jax.config import Config
from mtraining_jax.utils.errors import UserError


def use_compile_cache(config: Config) -> None:
    """Turns on JAX's persistent compilation cache; on GPUs it also keeps autotuning results."""
    folder = config.run.compile_cache_dir
    if folder == "auto":
        # Programs compiled for one kind of CPU may not run on others that share the folder.
        on_gpu = jax.default_backend() == "gpu"
        folder = str(config.run.local_output_dir / "compiled") if on_gpu else "never"
    if folder == "never":
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"run.compile_cache_dir = {folder} is not writable ({error.strerror}); set it to a "
            'writable folder, or to "never" to turn the cache off'
        ) from error
    jax.config.update("jax_compilation_cache_dir", folder)
    # By default JAX skips programs that compile in less than a second, dozens at each start.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # JAX decides at the first compilation whether there is a cache, so reset that decision.
    compilation_cache.reset_cache()
