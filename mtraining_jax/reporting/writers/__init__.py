"""Metric writers.

A new writer needs a module, a switch in the `metrics` section and a line in `WRITERS`. Its `write`
takes the record of a step, and `close` waits until all of them are written.
"""

import contextlib
from collections.abc import Iterator

from mtraining_jax.callbacks import Callback, Record
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


class Writers(Callback):
    """Writes records with all enabled writers, in one process only."""

    def __init__(self, config: Config, last_step: int) -> None:
        self._writers = open_writers(config, last_step)
        self.places = [writer.where for writer in self._writers]

    def initial(self, record: Record) -> None:
        self.step(record)

    def step(self, record: Record) -> None:
        for writer in self._writers:
            with written(writer.where, record["step"]):
                writer.write(record)

    def close(self) -> None:
        with contextlib.ExitStack() as opened:
            for writer in self._writers:
                opened.callback(writer.close)


@contextlib.contextmanager
def written(where: object, step: int) -> Iterator[None]:
    """Turns an OSError of the block, which writes into `where`, into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{where} is not writable ({error.strerror or error}) at step {step}; run the same "
            "command again to resume from the newest checkpoint"
        ) from error
