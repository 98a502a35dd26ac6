"""Console output during training: a progress bar on a terminal, lines elsewhere."""

import contextlib
import datetime
import errno
import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mtraining_jax.reporting.audit import audit_text
from mtraining_jax.reporting.record import (
    Record,
    density_of,
    held_out_text,
    imbalance_text,
    note_on_density,
    tuned_text,
)
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.signals import redirect_to_devnull


class Display:
    """Prints lines, and on a terminal a progress bar with loss, speed and ETA."""

    def __init__(self, enabled: bool = True, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True, quiet=not enabled)
        self._bar: Progress | None = None
        # For the ETA, which excludes the slow first step.
        self._first: tuple[int, float] | None = None
        self._total = 0
        self._held_out: str | None = None  # of the last evaluation

    def say(self, *lines: str) -> None:
        """Prints lines without markup; discards them once the terminal is closed."""
        try:
            for line in lines:
                self._console.print(line, markup=False)
        except OSError as error:
            self._console.quiet = True
            if self._console.file is sys.stdout:
                with contextlib.suppress(OSError, ValueError):  # no file, as in a notebook
                    redirect_to_devnull(sys.stdout.fileno())
            # The SIGHUP of a closed terminal stops the run, but may arrive after a failed write.
            if error.errno == errno.EIO and self._console.is_terminal:
                return
            raise UserError(
                f"the run's output cannot be written ({error.strerror}); the same command resumes "
                "from the newest checkpoint"
            ) from error

    def start(self, step: int, total: int) -> None:
        """Shows the bar with `step` of `total` steps done."""
        self._first = None
        self._total = total
        if not self._console.is_terminal:
            return
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("train", total=total, completed=step, status="")
        self._bar.start()

    def step(self, record: Record, line: bool) -> None:
        """Advances the bar; prints the step's metrics if `line`."""
        if self._first is None:
            self._first = record["step"], time.monotonic()
        if self._bar is not None:
            status = f"loss {_number(record['loss'], '.3f')}  {_speed(record)}"
            if (note := note_on_density(record)) is not None:
                status += f"  {note}"
            self._held_out = held_out_text(record) or self._held_out
            if self._held_out is not None:
                status += f"  validation loss {self._held_out}"
            self._bar.update(self._task, completed=record["step"], status=status)
        if line:
            left = None if self._bar is not None else self._time_left(record["step"])
            self.say(step_line(record, self._total) + ("" if left is None else f"  ETA {left}"))
        for alarm in record.get("alarms", ()):
            self.say(f"audit: {alarm}")

    def stop(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _time_left(self, step: int) -> datetime.timedelta | None:
        if self._first is None:
            return None
        first, begin = self._first
        if step in (first, self._total):
            return None
        seconds = (time.monotonic() - begin) / (step - first) * (self._total - step)
        return datetime.timedelta(seconds=round(seconds))


def step_line(record: Record, total: int) -> str:
    """The log line of a step."""
    parts = [
        f"step {record['step']:>{len(str(total))}}/{total}",
        f"loss {_number(record['loss'], '.4f')}",
        f"grad norm {_number(record['grad_norm'], '.3f')}",
        f"lr {record['lr']:.2e}",
        density_text(record),
    ]
    parts += audit_text(record)
    if (groups := imbalance_text(record)) is not None:
        parts.append(f"imbalance {groups}")
    if (tuned := tuned_text(record)) is not None:
        parts.append(tuned)
    if (held_out := held_out_text(record)) is not None:
        parts.append(f"validation loss {held_out}")
    if record["skipped_steps"]:
        parts.append(f"skipped {record['skipped_steps']}")
    parts += [_speed(record), f"{record['step_seconds']:.2f} s/step"]
    if record["mfu"] is not None:  # FLOP rates are not useful on devices of unknown peak
        parts += [
            f"{_rate(record['tflops_per_device_executed'])} TFLOP/s per device executed",
            f"{_rate(record['tflops_per_device_dense_equivalent'])} dense-equivalent",
            f"MFU {record['mfu']:.1%}",
        ]
    if record["memory_bytes_peak"] is not None:
        in_use, peak = (record[f"memory_bytes_{what}"] / 2**30 for what in ("in_use", "peak"))
        parts.append(f"memory {in_use:.1f} GiB, peak {peak:.1f}")
    return "  ".join(parts)


def density_text(record: Record) -> str:
    """The density, with a note if pairs were not selected."""
    share = _number(density_of(record), ".1%")
    note = note_on_density(record)
    if note is None:
        return f"density {share}" + (" (dense step)" if record.get("dense_step") else "")
    text = f"density {share} ({note}"
    if record.get("estimated_density") is not None:
        text += f"; selection, run for timing only, had {record['estimated_density']:.1%}"
    return text + ")"


def _speed(record: Record) -> str:
    return f"{record['tokens_per_second']:,.0f} tokens/s"


def _rate(tflops: float) -> str:
    """Three significant digits: 412, 41.2, 4.12, 0.412."""
    return format(tflops, ".0f" if tflops >= 100 else ".3g")


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)
