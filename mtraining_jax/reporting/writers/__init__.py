"""Metric writers.

A new writer needs a module, a switch in the `metrics` section and a line in `WRITERS`.
"""

from collections.abc import Callable
from typing import Protocol

from mtraining_jax.config import Config
from mtraining_jax.reporting.record import Record
from mtraining_jax.reporting.writers.jsonl import JsonlWriter
from mtraining_jax.reporting.writers.tensorboard import TensorBoardWriter
from mtraining_jax.reporting.writers.wandb import WandbWriter
from mtraining_jax.utils.errors import UserError


class Writer(Protocol):
    """Interface of metric writers.

    Attributes:
        where: what the run prints about the place of its metrics.
    """

    where: str

    def write(self, record: Record) -> None:
        """Writes the record of one step."""

    def close(self) -> None:
        """Waits until all records are written."""


# By switch in the `metrics` section. wandb is first: if it is missing, nothing must be written.
WRITERS: dict[str, Callable[[Config, int], Writer]] = {
    "wandb": WandbWriter,
    "jsonl": JsonlWriter,
    "tensorboard": TensorBoardWriter,
}


def open_writers(config: Config, last_step: int) -> list[Writer]:
    """Opens the writers enabled in the `metrics` section; call in one process only.

    Records after `last_step`, from which the run resumes, are removed.
    """
    writers: list[Writer] = []
    try:
        for switch, open_writer in WRITERS.items():
            if getattr(config.metrics, switch):
                writers.append(open_writer(config, last_step))
    except BaseException as error:
        for writer in writers:
            writer.close()
        if isinstance(error, OSError):
            raise UserError(
                f"{config.run.folder}: metrics cannot be written: {error.strerror}"
            ) from error
        raise
    return writers
