"""TensorBoard event files."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator

from mtraining_jax.config import Config
from mtraining_jax.errors import UserError
from mtraining_jax.reporting.audit import PER_HEAD
from mtraining_jax.reporting.record import Record

TENSORBOARD_NAME = "tensorboard"
# Seconds between two writes to the disk: TensorBoard reads the file again every 30.
_PATIENCE = 10.0


class TensorBoardWriter:
    """One curve for each number of a record, and one for each layer of a list; alarms as text.

    tensorboardX makes the events. Its own writer is not used: it writes in a thread, where a full
    disk ends in a traceback and not in an error of the run.

    Args:
        config: of the run.
        last_step: points of later steps are no longer shown.
    """

    def __init__(self, config: Config, last_step: int) -> None:
        # Not at the top: the import takes a while, and the writer may be switched off.
        from tensorboardX.proto import event_pb2
        from tensorboardX.record_writer import RecordWriter

        folder = config.run.folder / TENSORBOARD_NAME
        self.where = str(folder)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9}.{socket.gethostname()}.{os.getpid()}"
        self._event = event_pb2.Event
        self._file = RecordWriter(str(folder / name))
        self._failed = False
        self._written = 0.0
        self._add(file_version="brain.Event:2")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(session_log=start, step=last_step + 1)

    def write(self, record: Record) -> None:
        """Adds a point to each curve."""
        from tensorboardX import summary

        step = record["step"]
        with self._noting_failure():
            for name, value in record.items():
                if name.endswith(PER_HEAD):  # thousands of curves
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
        """Writes what is left.

        Raises:
            UserError: if it cannot be written, unless `write` has told so before.
        """
        try:
            if not self._failed:
                self._file.flush()
        except OSError as error:
            raise UserError(
                f"{self.where} cannot be written ({error.strerror}): its last points are missing"
            ) from error
        finally:
            with contextlib.suppress(OSError):  # which has been told
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
