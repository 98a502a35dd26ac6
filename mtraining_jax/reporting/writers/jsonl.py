"""metrics.jsonl: one JSON object per step."""

import contextlib
import json
from pathlib import Path

from mtraining_jax.config import Config
from mtraining_jax.reporting.record import Record

JSONL_NAME = "metrics.jsonl"


class JsonlWriter:
    """Appends lines to RUN_FOLDER/metrics.jsonl and flushes each.

    Args:
        config: the run.
        last_step: lines of later steps are removed first.
    """

    def __init__(self, config: Config, last_step: int) -> None:
        path = config.run.folder / JSONL_NAME
        self.where = str(path)
        kept = _lines_until(path, last_step)
        # Renamed into place, so that an interruption loses no line.
        new = path.with_suffix(".new")
        new.write_text("".join(kept), encoding="utf-8")
        new.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `write` flushes and raises errors
            self._file.close()


def _lines_until(path: Path, last_step: int) -> list[str]:
    """Complete lines of steps up to `last_step`, if the file exists."""
    lines = []
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    step = json.loads(line)["step"]
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue  # truncated line
                if isinstance(step, int) and step <= last_step:
                    lines.append(line)
    return lines
