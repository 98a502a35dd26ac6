"""metrics.jsonl: one JSON object per step, and one of step 0 for the first validation loss."""

import contextlib
import json
from pathlib import Path

from mtraining_jax.callbacks import Record
from mtraining_jax.config import Config
from mtraining_jax.utils.printable import print_message
from mtraining_jax.utils.text import counted


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
