"""A whole run: checks, joining the other processes, training, and the summary at the end."""

import jax
from jax.experimental import multihost_utils

from mtraining_jax.config import Config
from mtraining_jax.errors import UserError
from mtraining_jax.reporting.progress import Display
from mtraining_jax.reporting.record import Record
from mtraining_jax.reporting.summary import already_complete, summary
from mtraining_jax.training import distributed, run_folder
from mtraining_jax.training.compile_cache import use_compile_cache
from mtraining_jax.training.export import export_checkpoint
from mtraining_jax.training.loop.trainer import Trainer


def run(config: Config) -> list[Record]:
    """Trains as the configuration says, from the newest checkpoint if there is one.

    All that can be checked is checked before the first step, and the output folder before any
    device is touched. Of several processes, the first prints and writes metrics.

    Args:
        config: a checked configuration; the platform of JAX is set already.

    Returns:
        The records of the steps that this call took, as in metrics.jsonl; on all processes.

    Raises:
        UserError: for anything that the user can correct, before the run or during it.
    """
    run_folder.check_writable(config)
    joined = distributed.initialize(config.distributed)
    try:
        with Display(enabled=distributed.is_first()) as display:
            records = _run(config, display)
    except UserError:  # on all processes
        if joined:
            distributed.shutdown()
        raise
    except Exception as error:
        if joined:
            distributed.leave(error)
        raise
    if joined:
        distributed.shutdown()
    return records


def _run(config: Config, display: Display) -> list[Record]:
    """The same between joining the other processes and leaving them."""
    resume_from = run_folder.resume_step(config)
    if resume_from is not None and resume_from >= config.run.steps:
        display.say(*already_complete(config, resume_from))
        if config.checkpoint.export_hf:
            display.say(f"  wrote      {export_checkpoint(config, resume_from)}")
        return []
    use_compile_cache(config)
    _prepare_folder(config, resume_from, display)
    with Trainer(config, resume_from, display) as trainer:
        try:
            records = trainer.train()
            trainer.export()
        except KeyboardInterrupt as error:
            raise UserError(trainer.interrupted()) from error
    display.say(*summary(config, records, trainer.wrote()))
    return records


def _prepare_folder(config: Config, resume_from: int | None, display: Display) -> None:
    """Makes the run's folder; moves an earlier run aside if this one starts anew."""
    if distributed.is_first():
        aside = run_folder.move_aside(config) if resume_from is None else None
        if aside is not None:
            display.say(f"starting anew: what the last run of this name wrote is now in {aside}")
        config.run.folder.mkdir(parents=True, exist_ok=True)
    if jax.process_count() > 1:
        # The others must not look for checkpoints before the folder is ready.
        multihost_utils.sync_global_devices("the folder of the run is ready")
