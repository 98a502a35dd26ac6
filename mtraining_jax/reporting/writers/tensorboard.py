"""TensorBoard event files."""

import contextlib
import os
import socket
import time
from typing import Any, cast

from mtraining_jax.callbacks import Record
from mtraining_jax.config import Config
from mtraining_jax.reporting.audit import PER_HEAD
from mtraining_jax.utils.errors import UserError

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
