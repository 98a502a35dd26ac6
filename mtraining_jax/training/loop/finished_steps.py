"""Reports finished steps: makes their records, writes and prints them."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from mtraining_jax.attention.picture import Panel, draw
from mtraining_jax.config import Config
from mtraining_jax.reporting.alarms import Alarms
from mtraining_jax.reporting.audit import audit_record
from mtraining_jax.reporting.goodput import Goodput
from mtraining_jax.reporting.history import History
from mtraining_jax.reporting.progress import Display
from mtraining_jax.reporting.record import Record, step_record
from mtraining_jax.reporting.writers import Writer
from mtraining_jax.training.loop.watchdog import HangWatchdog
from mtraining_jax.training.tuning.replica_load import ReplicaLoad
from mtraining_jax.utils.errors import UserError


class DispatchedStep(NamedTuple):
    """A step that the devices may not have finished."""

    metrics: dict[str, Any]  # still on the devices
    notes: Record  # more entries of its record
    program: str  # its name
    begun: float  # by time.perf_counter(), before the step was dispatched
    data_seconds: float  # of waiting for its batch before that
    profiled: bool
    # Called when the step is finished, with a function to call after each part of its work; returns
    # more entries for the record. Until then the state must stay valid.
    evaluate: Callable[[Callable[[], None]], Record] | None


class FinishedSteps:
    """Waits for each step in a separate thread, and reports it as soon as it is finished.

    Dispatching a step may block until the devices have almost finished it, so the training loop
    itself would report the previous step too late. `replicas` is None if they have equal work;
    `of_processes` returns the newest `goodput.of_steps` of each process.
    """

    def __init__(
        self,
        config: Config,
        devices: Sequence[Any],
        writers: Sequence[Writer],
        display: Display,
        alarms: Alarms,
        watchdog: HangWatchdog,
        replicas: ReplicaLoad | None,
        goodput: Goodput,
        of_processes: Callable[[], Sequence[Mapping[str, float]]],
    ) -> None:
        self._config, self._devices, self._replicas = config, devices, replicas
        self._writers, self._display = writers, display
        self._alarms, self._watchdog = alarms, watchdog
        self._goodput, self._of_processes = goodput, of_processes
        self._thread = ThreadPoolExecutor(1, "finished steps")
        # A picture takes longer than most steps, and must not delay their report.
        self._pictures = ThreadPoolExecutor(1, "pictures")
        self._pending: Future[None] | None = None  # report of the last step
        self._picture: Future[None] | None = None  # the last one
        self._history, self._closed = History(), False
        self._between: Record = {}  # times of blocks before the next step
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

    def add_validation(self, evaluate: Callable[[Callable[[], None]], Record]) -> None:
        """Reports an evaluation before the first step, as step 0."""
        with self._watchdog.watch("the evaluation before step 1") as restart:
            record = {"step": 0} | evaluate(restart)
        self._goodput.add("eval", record["eval_seconds"])
        for writer in self._writers:
            with self._written(writer.where, 0):
                writer.write(record)
        self._display.validation(record, self._config.run.steps)
        self._history.add_validation(record)

    def wait(self) -> History:
        """Waits until all added steps are reported and their masks drawn; returns the history."""
        if self._pending is not None:
            self._pending.result()
        if self._picture is not None:
            self._picture.result()
        return self._history

    def close(self) -> None:
        """Waits for the devices; a step that is still running is not reported."""
        self._closed = True
        self._thread.shutdown()
        self._pictures.shutdown()

    def _report(self, dispatched: DispatchedStep) -> None:
        jax.block_until_ready(dispatched.metrics)
        self._watchdog.end()
        metrics = dict(dispatched.metrics)
        if (guard := metrics.pop("guard", None)) is not None and guard.held:
            return  # the step is taken again
        now = time.perf_counter()
        host_wait = max(0.0, dispatched.begun - self._clock)
        data = min(host_wait, dispatched.data_seconds)
        seconds, self._clock = now - self._clock, now
        del metrics["parameter_norms"]  # many small arrays, which only outliers need
        metrics = jax.device_get(metrics)
        of_replicas = {} if self._replicas is None else self._replicas.finish(metrics)
        record = step_record(metrics, seconds, self._config, self._devices)
        record |= of_replicas | self._between | {"data_seconds": data}
        program = "profiled" if dispatched.profiled else dispatched.program
        self._goodput.step(program, seconds, host_wait, data)
        self._between = {}
        if dispatched.profiled:
            record["profiled"] = True  # tracing slows the step down
        audited = "audit" in metrics
        if audited:
            record |= audit_record(metrics["audit"])
            record["alarms"] = self._alarms.of(record)
        if dispatched.notes:
            alarms = [*dispatched.notes.get("alarms", ()), *record.get("alarms", ())]
            record |= dispatched.notes | ({"alarms": alarms} if alarms else {})
        step, run = record["step"], self._config.run
        if dispatched.evaluate is not None and not self._closed:
            with self._watchdog.watch(f"the evaluation after step {step}") as restart:
                record |= dispatched.evaluate(restart)
            self._goodput.add("eval", record["eval_seconds"])
        record |= self._goodput.record(self._of_processes())
        if self._closed:
            return
        for writer in self._writers:
            with self._written(writer.where, step):
                writer.write(record)
        shown = step % run.log_interval == 0 or step in (1, run.steps)
        self._display.step(record, shown or audited or dispatched.evaluate is not None)
        if "masks" in metrics and self._writers:
            if self._picture is not None:
                self._picture.result()
            self._picture = self._pictures.submit(self._draw, metrics["masks"], record)
        self._check_finite(metrics, record)
        self._history.add(record)

    @contextlib.contextmanager
    def _written(self, where: str | Path, step: int) -> Iterator[None]:
        """Ends the run if the block cannot write."""
        try:
            yield
        except OSError as error:
            self._closed = True
            raise UserError(
                f"{where} is not writable ({error.strerror or error}) at step {step}; run the same "
                "command again to resume from the newest checkpoint"
            ) from error

    def _draw(self, masks: Any, record: Record) -> None:
        path = self._config.run.folder / "masks" / f"step_{record['step']:07d}.png"
        chosen = self._config.audited_masks
        heads = sorted({head for _, head in chosen})
        panels = []
        for layer, head in chosen:
            index = jax.tree.map(lambda x, layer=layer: x[layer], masks)
            recall = record["recall_per_head"][layer][head]
            title = f"layer {layer}, head {head}"
            if recall is not None:
                title += f"\nstep {record['step']}, recall {recall:.1%}"
            panels.append(Panel(index, 0, heads.index(head), title))
        with self._written(path, record["step"]):
            path.parent.mkdir(exist_ok=True)
            draw(path, panels, self._config.data.seq_len)

    def _check_finite(self, metrics: dict[str, Any], record: Record) -> None:
        in_row, allowed = int(metrics["skipped_in_row"]), self._config.optimizer.max_skipped_steps
        if in_row <= allowed:
            return
        self._closed = True
        name, what = ("loss",) * 2 if record["loss"] is None else ("grad_norm", "gradient norm")
        limit = self._config.optimizer.skip_norm
        why = f"not finite or above optimizer.skip_norm = {limit:g}" if limit else "not finite"
        raise UserError(
            f"the {what} is {float(metrics[name])} at step {record['step']}: {in_row} consecutive "
            f"steps were {why}, more than optimizer.max_skipped_steps = {allowed}; try a "
            "lower optimizer.lr, a longer optimizer.warmup_steps or other data"
        )
