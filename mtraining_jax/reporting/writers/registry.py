"""The writers there are, and which of them a configuration asks for."""

from collections.abc import Callable
from typing import Protocol

from mtraining_jax.config import Config
from mtraining_jax.errors import UserError
from mtraining_jax.reporting.record import Record
from mtraining_jax.reporting.writers.jsonl import JsonlWriter
from mtraining_jax.reporting.writers.tensorboard import TensorBoardWriter
from mtraining_jax.reporting.writers.wandb import WandbWriter


class Writer(Protocol):
    """Where records go."""

    where: str

    def write(self, record: Record) -> None:
        """Takes the record of one step."""

    def close(self) -> None:
        """Returns when all records are where they belong."""


# By the switch of the `metrics` section. wandb stands first: it may not be installed, and then
# nothing must have been written.
WRITERS: dict[str, Callable[[Config, int], Writer]] = {
    "wandb": WandbWriter,
    "jsonl": JsonlWriter,
    "tensorboard": TensorBoardWriter,
}


def open_writers(config: Config, last_step: int) -> list[Writer]:
    """The writers that the `metrics` section asks for, to be opened by one process only.

    Args:
        config: of the run.
        last_step: the step that the run resumes from; what an interrupted run has written about
            later steps is removed.

    Returns:
        The open writers.

    Raises:
        UserError: if wandb is asked for and not installed, or a file cannot be written.
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
