"""TensorBoard event files."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from mtraining_jax.config import Config
from mtraining_jax.reporting.audit import PER_HEAD
from mtraining_jax.reporting.record import Record
from mtraining_jax.utils.errors import UserError

TENSORBOARD_NAME = "tensorboard"
# Seconds between flushes; TensorBoard reloads every 30.
_PATIENCE = 10.0


class TensorBoardWriter:
    """Writes one curve per metric, or per layer for lists, and warnings as text.

    Uses tensorboardX to create events, but not its writer: that writes in a thread, where a full
    disk causes a traceback instead of an error of the run.
    """

    def __init__(self, config: Config, last_step: int) -> None:
        # A slow import, so only if the writer is enabled.
        # Generated at import, so without type information.
        from tensorboardX.proto import event_pb2 as generated
        from tensorboardX.record_writer import RecordWriter

        folder = config.run.folder / TENSORBOARD_NAME
        self.where = str(folder)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9}.{socket.gethostname()}.{os.getpid()}"
        event_pb2: Any = generated
        self._event = event_pb2.Event
        self._file = RecordWriter(str(folder / name))
        self._failed = False
        self._written = 0.0
        self._add(file_version="brain.Event:2")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(session_log=start, step=last_step + 1)

    def write(self, record: Record) -> None:
        from tensorboardX import summary

        step = record["step"]
        with self._noting_failure():
            for name, value in record.items():
                if name.endswith(PER_HEAD):
                    continue
                if name == "alarms":
                    for sentence in value:
                        self._add(summary=summary.text(name, sentence), step=step)
                    continue
                values = value if isinstance(value, list) else [value]
                for layer, number in enumerate(values):
                    tag = f"{name}/{layer:02d}" if isinstance(value, list) else f"train/{name}"
                    if number is not None and not isinstance(number, str) and name != "step":
                        self._add(summary=summary.scalar(tag, number), step=step)
            if time.monotonic() - self._written > _PATIENCE:
                self._file.flush()
                self._written = time.monotonic()

    def close(self) -> None:
        """Flushes and closes the file."""
        try:
            if not self._failed:
                self._file.flush()
        except OSError as error:
            raise UserError(
                f"{self.where} cannot be written ({error.strerror}): its last points are missing"
            ) from error
        finally:
            with contextlib.suppress(OSError):  # already raised
                self._file.close()

    def _add(self, **fields: object) -> None:
        self._file.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._failed = True
            raise
