"""Reports finished steps: makes their records, and hands them to the callbacks of the run."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from mtraining_jax.callbacks import Callback, Record, Run
from mtraining_jax.reporting.goodput import Goodput
from mtraining_jax.reporting.record import step_record
from mtraining_jax.training.loop.watchdog import HangWatchdog
from mtraining_jax.training.state import TrainState
from mtraining_jax.utils.errors import UserError


class DispatchedStep(NamedTuple):
    """A step that the devices may not have finished."""

    metrics: dict[str, Any]  # still on the devices
    notes: Record  # more entries of its record
    program: str  # its name
    begun: float  # by time.perf_counter(), before the step was dispatched
    data_seconds: float  # of waiting for its batch before that
    profiled: bool
    state: TrainState | None  # if a callback wants it; must stay valid until the step is reported


class Reporter:
    """Waits for each step in a separate thread, and reports it as soon as it is finished.

    Dispatching a step may block until the devices have almost finished it, so the training loop
    itself would report the previous step too late.
    """

    def __init__(
        self, run: Run, callbacks: Sequence[Callback], watchdog: HangWatchdog, goodput: Goodput
    ) -> None:
        self._run, self._callbacks = run, callbacks
        self._watchdog, self._goodput = watchdog, goodput
        self._thread = ThreadPoolExecutor(1, "finished steps")
        self._pending: Future[None] | None = None  # report of the last step
        self._closed = False
        self._between: Record = {}  # times of blocks before the next step
        self._waited: tuple[float, float] | None = None  # before the first pass of a held step
        self.restart_clock()

    def restart_clock(self) -> None:
        """Restarts the timer of the next step; no step may be running."""
        self._clock = time.perf_counter()

    @contextlib.contextmanager
    def paused(self, name: str | None = None) -> Iterator[None]:
        """Waits for all added steps, and keeps the block out of the time of the next one.

        The record of the next step has the time of the block as NAME_seconds.
        """
        self.wait()
        self.restart_clock()
        yield
        if name is not None:
            self._between[f"{name}_seconds"] = seconds = time.perf_counter() - self._clock
            self._goodput.add(name, seconds)
        self.restart_clock()

    def add(self, step: DispatchedStep) -> None:
        """Adds a step; returns when the one before it is reported."""
        before, self._pending = self._pending, self._thread.submit(self._report, step)
        if before is not None:
            before.result()

    def report_initial(self, state: TrainState) -> None:
        """Reports what callbacks find in the state before the first step, as step 0."""
        record: Record = {"step": 0}
        for callback in self._callbacks:
            record |= self._with_state(callback, state, record)
        if len(record) > 1:
            for callback in self._callbacks:
                callback.initial(record)

    def wait(self) -> None:
        """Waits until all added steps are reported."""
        if self._pending is not None:
            self._pending.result()

    def close(self) -> None:
        """Waits for the devices; a step that is still running is not reported."""
        self._closed = True
        self._thread.shutdown()

    def _report(self, dispatched: DispatchedStep) -> None:
        jax.block_until_ready(dispatched.metrics)
        self._watchdog.end()
        metrics = dict(dispatched.metrics)
        now = time.perf_counter()
        host_wait = max(0.0, dispatched.begun - self._clock)
        data = min(host_wait, dispatched.data_seconds)
        if (guard := metrics.pop("guard", None)) is not None and guard.held:
            self._waited = self._waited or (host_wait, data)
            return  # the step is taken again
        program = "profiled" if dispatched.profiled else dispatched.program
        if self._waited is not None:  # between the passes, the devices had work
            (host_wait, data), self._waited = self._waited, None
            program = f"repeated {program}"
        seconds, self._clock = now - self._clock, now
        self._goodput.step(program, seconds, host_wait, data)
        del metrics["parameter_norms"]  # many small arrays, which only outliers need
        metrics = jax.device_get(metrics)
        measured = [(callback, callback.measured(metrics)) for callback in self._callbacks]
        devices = self._run.mesh.local_devices
        record = step_record(metrics, seconds, self._run.config, devices)
        for callback, entries in measured:
            _add(record, callback, entries)
        record |= dispatched.notes | self._between | {"data_seconds": data}
        self._between = {}
        if dispatched.profiled:
            record["profiled"] = True  # tracing slows the step down
        try:
            self._run.reports(record["step"])
            for callback in self._callbacks:
                if self._closed:
                    return
                if dispatched.state is not None:
                    _add(record, callback, self._with_state(callback, dispatched.state, record))
                _add(record, callback, callback.step(record))
            self._check_finite(metrics, record)
        except BaseException:
            self._closed = True  # the next step may have begun
            raise

    def _with_state(self, callback: Callback, state: TrainState, record: Record) -> Record:
        if not callback.wants_state(step := record["step"]):
            return {}
        what = getattr(callback, "task", f"the callback {type(callback).__name__}")
        what += f" after step {step}" if step else " before step 1"
        begin = time.perf_counter()
        with self._watchdog.watch(what) as self._run.alive:
            entries = callback.with_state(step, state)
        self._goodput.add("eval", time.perf_counter() - begin)
        return entries

    def _check_finite(self, metrics: dict[str, Any], record: Record) -> None:
        optimizer, in_row = self._run.config.optimizer, int(metrics["skipped_in_row"])
        if in_row <= (allowed := optimizer.max_skipped_steps):
            return
        name, what = ("loss",) * 2 if record["loss"] is None else ("grad_norm", "gradient norm")
        limit = optimizer.skip_norm
        why = f"not finite or above optimizer.skip_norm = {limit:g}" if limit else "not finite"
        raise UserError(
            f"the {what} is {float(metrics[name])} at step {record['step']}: {in_row} consecutive "
            f"steps were {why}, more than optimizer.max_skipped_steps = {allowed}; try a "
            "lower optimizer.lr, a longer optimizer.warmup_steps or other data"
        )


def _add(record: Record, callback: Callback, entries: Record | None) -> None:
    """Adds what a callback returned; alarms of several ones are joined."""
    entries = dict(entries or {})
    if "alarms" in entries:
        record["alarms"] = [*record.get("alarms", ()), *entries.pop("alarms")]
    if taken := sorted(entries.keys() & record.keys()):
        raise UserError(
            f"the callback {type(callback).__name__} returned {', '.join(map(repr, taken))}, but "
            "the record of a step already has that: give it another name"
        )
    record |= entries
