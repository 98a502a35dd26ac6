"""Metric writers.

A new writer needs a module, a switch in the `metrics` section and a line in `WRITERS`. Its `write`
takes the record of a step, and `close` waits until all of them are written.
"""

import contextlib

from mtraining_jax.config import Config
from mtraining_jax.reporting.writers.jsonl import JsonlWriter
from mtraining_jax.reporting.writers.tensorboard import TensorBoardWriter
from mtraining_jax.reporting.writers.wandb import WandbWriter
from mtraining_jax.utils.errors import UserError

# `where` is the place of its metrics, as the run prints it.
Writer = WandbWriter | JsonlWriter | TensorBoardWriter

# By switch in the `metrics` section. wandb is first: if it is missing, nothing must be written.
WRITERS: dict[str, type[Writer]] = {
    "wandb": WandbWriter,
    "jsonl": JsonlWriter,
    "tensorboard": TensorBoardWriter,
}


def open_writers(config: Config, last_step: int) -> list[Writer]:
    """Opens the enabled writers, in one process only; removes records after `last_step`."""
    writers: list[Writer] = []
    with contextlib.ExitStack() as opened:
        try:
            for switch, open_writer in WRITERS.items():
                if getattr(config.metrics, switch):
                    writers.append(open_writer(config, last_step))
                    opened.callback(writers[-1].close)
        except OSError as error:
            raise UserError(
                f"{config.run.folder}: metrics cannot be written: {error.strerror}"
            ) from error
        opened.pop_all()
    return writers
