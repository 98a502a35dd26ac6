"""Metric writers.

A new writer needs a class, a switch in the `metrics` section and a line in `WRITERS`. Its `write`
takes the record of a step, and `close` waits until all of them are written.
"""

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from mtraining_jax.callbacks import Callback, Record
from mtraining_jax.config import Config
from mtraining_jax.reporting.audit import PER_HEAD
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.printable import print_message
from mtraining_jax.utils.text import counted


class WandbWriter:
    """Logs records to the project `mtraining-jax`; resumed runs continue their W&B run."""

    def __init__(self, config: Config, last_step: int) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UserError(
                "metrics.wandb = true needs the package wandb, which is not installed: pip install "
                "wandb, or uv run --extra wandb, or set metrics.wandb=false"
            ) from error
        self._run = wandb.init(  # pyright: ignore[reportAttributeAccessIssue]
            project="mtraining-jax",
            name=config.run.name,
            dir=str(config.run.folder),
            config=config.to_dict(),
            resume="allow",
            id=_run_id(config.run.folder / "wandb_id.txt", resumed=last_step > 0),
        )
        self.where = f"Weights & Biases ({self._run.url or 'offline'})"

    def write(self, record: Record) -> None:
        record = {name: x for name, x in record.items() if not name.endswith(PER_HEAD)}
        self._run.log(record, step=record["step"])

    def close(self) -> None:
        self._run.finish()


def _run_id(path: Path, resumed: bool) -> str:
    if resumed and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    new = uuid.uuid4().hex
    path.write_text(new + "\n", encoding="utf-8")
    return new


# Seconds between flushes; TensorBoard reloads every 30.
_PATIENCE = 10.0


class TensorBoardWriter:
    """Writes one curve per metric, or per layer for lists, and warnings as text."""

    def __init__(self, config: Config, last_step: int) -> None:
        # Slow imports, so only if the writer is enabled. The writer of tensorboardX writes in a
        # thread, where a full disk causes a traceback instead of an error of the run.
        from tensorboardX import summary
        from tensorboardX.proto import event_pb2
        from tensorboardX.record_writer import RecordWriter

        folder = config.run.folder / "tensorboard"
        self.where = str(folder)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9}.{socket.gethostname()}.{os.getpid()}"
        self._summary = summary
        self._events = events = cast(Any, event_pb2)  # generated at import, without types
        self._file = RecordWriter(str(folder / name))
        self._failed = False
        self._written = 0.0
        self._add(file_version="brain.Event:2")
        start = events.SessionLog(status=events.SessionLog.START)
        self._add(session_log=start, step=last_step + 1)

    def write(self, record: Record) -> None:
        step, curves = record["step"], {}
        for name, value in record.items():
            if isinstance(value, list) and not name.endswith(PER_HEAD):
                curves |= {f"{name}/{layer:02d}": x for layer, x in enumerate(value)}
            elif name != "step":
                curves[f"train/{name}"] = value
        try:
            for sentence in record.get("alarms", ()):
                self._add(summary=self._summary.text("alarms", sentence), step=step)
            for tag, value in curves.items():
                if isinstance(value, (int, float)):
                    self._add(summary=self._summary.scalar(tag, value), step=step)
            if time.monotonic() - self._written > _PATIENCE:
                self._file.flush()
                self._written = time.monotonic()
        except OSError:
            self._failed = True
            raise

    def close(self) -> None:
        try:
            if not self._failed:
                self._file.flush()
        except OSError as error:
            if error.__context__ is None:  # else another error ends the run, and explains more
                raise UserError(
                    f"{self.where} cannot be written ({error.strerror}): its last points are "
                    "missing"
                ) from error
        finally:
            with contextlib.suppress(OSError):  # already raised
                self._file.close()

    def _add(self, **fields: object) -> None:
        event = self._events.Event(wall_time=time.time(), **fields)
        self._file.write(event.SerializeToString())


class JsonlWriter:
    """Appends lines to RUN_FOLDER/metrics.jsonl and flushes each; removes those of later steps."""

    def __init__(self, config: Config, last_step: int) -> None:
        path = config.run.folder / "metrics.jsonl"
        self.where = str(path)
        # Renamed into place, so that an interruption loses no line.
        new = path.with_suffix(".new")
        if (missing := last_step - _copy(path, new, last_step)) > 0:
            what = f"has no line for {missing:,} of the {counted(last_step, 'step')} so far"
            print_message(f"note: {path} {what}; training is not affected")
        new.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `write` flushes and raises errors
            self._file.close()


def _copy(path: Path, new: Path, last_step: int) -> int:
    """Copies the lines up to a step, one in memory at a time; returns the number of steps."""
    count = 0
    with new.open("w", encoding="utf-8") as copy:
        if not path.is_file():
            return 0
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                # A truncated line is invalid JSON or has no step.
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    if (step := json.loads(line)["step"]) <= last_step:
                        copy.write(line.removesuffix("\n") + "\n")
                        count += step > 0  # step 0 is the evaluation before the first one
    return count


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
