"""Console output during training: a progress bar on a terminal, lines elsewhere."""

import contextlib
import datetime
import errno
import math
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mtraining_jax.callbacks import Callback, Record, Run, State
from mtraining_jax.reporting.audit import audit_text
from mtraining_jax.reporting.record import (
    SPEEDS,
    density_of,
    note_on_density,
    number,
    rate,
    speed_text,
    validation_text,
)
from mtraining_jax.utils.console import Output
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.signals import redirect_to_devnull


class Display(Callback):
    """Prints lines, and on a terminal a progress bar with loss, speed and ETA."""

    def __init__(self, enabled: bool = True, console: Console | None = None) -> None:
        self._console = console or Output(quiet=not enabled)
        self._bar: Progress | None = None
        # For the ETA, which excludes the slow first step.
        self._first: tuple[int, float] | None = None
        self._total, self._interval = 0, 1  # steps, and those between lines
        self._validation: str | None = None  # of the last evaluation

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

    def start(self, run: Run, state: State) -> None:
        self._first, self._total = None, run.config.run.steps
        self._interval = run.config.run.log_interval
        if not self._console.is_terminal:
            return
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            speed_estimate_period=math.inf,  # by default 30 s, too short for long steps
        )
        done = int(state.step)
        self._task = self._bar.add_task("train", total=self._total, completed=done, status="")
        self._bar.start()

    def step(self, record: Record) -> None:
        step = record["step"]
        if self._first is None:
            self._first = step, time.monotonic()
        self._validation = validation_text(record) or self._validation
        if self._bar is not None:
            status = f"loss {number(record['loss'], '.3f')}  {_speed(record)}"
            if (note := note_on_density(record)) is not None:
                status += f"  {note}"
            if self._validation is not None:
                status += f"  validation loss {self._validation}"
            self._bar.update(self._task, completed=step, status=status)
        extra = "recall_per_head" in record or "eval_seconds" in record
        if step % self._interval == 0 or step in (1, self._total) or extra:
            text, (first, begin) = step_line(record, self._total), self._first
            done = step - first
            if self._bar is None and done and step != self._total:
                left = (time.monotonic() - begin) / done * (self._total - step)
                text += f"  ETA {datetime.timedelta(seconds=round(left))}"
            self.say(text)
        for alarm in record.get("alarms", ()):
            self.say(f"warning: {alarm}")

    def initial(self, record: Record) -> None:
        """Prints the validation loss before the first step."""
        if (text := validation_text(record)) is not None:
            self._validation, total = text, self._total
            self.say(f"step {0:>{len(str(total))}}/{total}  validation loss {text}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def step_line(record: Record, total: int) -> str:
    """The log line of a step."""
    parts = [
        f"step {record['step']:>{len(str(total))}}/{total}",
        f"loss {number(record['loss'], '.4f')}",
        f"grad norm {number(record['grad_norm'], '.3f')}",
        *([] if record["lr"] is None else [f"lr {record['lr']:.2e}"]),
        _density(record),
        *audit_text(record),
    ]
    if (imbalance := record.get("attention_imbalance")) is not None:
        parts.append(f"imbalance {imbalance:.2f}")
    elif (imbalance := record.get("attention_imbalance_predicted")) is not None:
        parts.append(f"imbalance {imbalance:.2f} (predicted)")
    if "tuned" in record:
        fractions = record["tuned_by_group"]
        text = f"{record['tuned']} {min(fractions):.3f} to {max(fractions):.3f}"
        if record["infeasible"]:
            text += f" (infeasible for {record['infeasible']:.0%} of replicas)"
        parts.append(text)
    if (validation := validation_text(record)) is not None:
        parts.append(f"validation loss {validation}")
    if record["skipped_steps"]:
        parts.append(f"skipped {record['skipped_steps']}")
    parts += [_speed(record), f"{record['step_seconds']:.2f} s/step"]
    if record["mfu"] is not None:  # FLOP rates are not useful on devices of unknown peak
        parts += [
            f"{rate(record['tflops_per_device_executed'])} TFLOP/s per device executed",
            f"{rate(record['tflops_per_device_dense_equivalent'])} dense-equivalent",
            f"MFU {record['mfu']:.1%}",
        ]
    if record["memory_bytes_peak"] is not None:
        in_use, peak = (record[f"memory_bytes_{what}"] / 2**30 for what in ("in_use", "peak"))
        parts.append(f"memory {in_use:.1f} GiB, peak {peak:.1f}")
    return "  ".join(parts)


def _density(record: Record) -> str:
    text, note = f"density {number(density_of(record), '.1%')}", note_on_density(record)
    if note is None:
        return text + (" (dense step)" if record.get("dense_step") else "")
    if (estimated := record.get("estimated_density")) is not None:
        note += f"; selection, run for timing only, had {estimated:.1%}"
    return f"{text} ({note})"


def _speed(record: Record) -> str:
    return speed_text(*(record[name] for name in SPEEDS))
