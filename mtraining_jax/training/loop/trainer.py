"""The training loop, and the parts of a run."""

import contextlib
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import jax
import numpy as np
from jax.experimental import multihost_utils

from mtraining_jax.attention.picture import check_pictures
from mtraining_jax.config import Config
from mtraining_jax.data.advice import slow_start
from mtraining_jax.reporting.alarms import Alarms
from mtraining_jax.reporting.banner import ParameterCount, banner
from mtraining_jax.reporting.history import History
from mtraining_jax.reporting.progress import Display
from mtraining_jax.reporting.writers import open_writers
from mtraining_jax.training.build import build_layout, build_mesh, build_pattern
from mtraining_jax.training.checkpoint.export import export_state
from mtraining_jax.training.device_batches import DeviceBatches
from mtraining_jax.training.loop.finished_steps import FinishedSteps
from mtraining_jax.training.loop.profile import ProfileWindow
from mtraining_jax.training.loop.programs import Programs, compile_programs, make_programs
from mtraining_jax.training.loop.saving import Saving
from mtraining_jax.training.loop.watchdog import HangWatchdog
from mtraining_jax.training.memory_check import check_state_memory
from mtraining_jax.training.processes import distributed
from mtraining_jax.training.processes.agreement import check_same_data
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.tuning.group_work import GroupWork
from mtraining_jax.training.tuning.tuner import Tuner
from mtraining_jax.training.validation import Evaluator
from mtraining_jax.utils.signals import EXIT_STUCK, Stopped, StopSignals, exit_immediately

# Keys of a checkpoint next to the position in the data: tuner state and audit alarms.
_TUNING, _ALARMS = "sparsity.tune", "audit.alarms"


class Trainer:
    """One run, from its first step or from a checkpoint to its last step.

    Use it in a `with` block, which ends when everything is written. `signals` are the stop signals
    of the command; None for a call from Python.

    Raises:
        UserError: if devices, data, model or checkpoint do not match the configuration.
    """

    def __init__(
        self,
        config: Config,
        resume_from: int | None,
        display: Display,
        signals: StopSignals | None = None,
    ) -> None:
        self._config, self._display, self._signals = config, display, signals
        self._start = self._step = resume_from or 0
        self._newest_checkpoint: Callable[[], int | None] = lambda: resume_from
        self._exported: Path | None = None
        # If a step below fails, what is already open is closed in reverse order.
        with contextlib.ExitStack() as opened:
            self._open_parts(resume_from, opened)
            self._opened = opened.pop_all()

    def _open_parts(self, resume_from: int | None, opened: contextlib.ExitStack) -> None:
        config, display = self._config, self._display
        if config.audit.masks:
            check_pictures("audit.masks")
        mesh, layout = build_mesh(config), build_layout(config)
        pattern = build_pattern(config)
        # Ends the process only for the command; the caller of `train` may need it. It is closed
        # last, when nothing waits for devices or for other processes.
        self._watchdog = HangWatchdog(
            config.run.step_timeout_seconds, display.say, self._leave if self._signals else None
        )
        opened.callback(self._watchdog.close)
        if (advice := slow_start(config.data)) is not None:
            display.say(advice)
        self._batches = DeviceBatches(config, mesh, layout)
        opened.callback(self._batches.close)
        check_same_data(self._batches.loader.identity, "data")
        self._builder = builder = StateBuilder(config, mesh)
        self._programs = make_programs(config, builder, mesh, layout, pattern, self._step)
        self._devices = mesh.local_devices
        self._evaluator = Evaluator(config, builder, mesh) if config.eval.interval else None
        if self._evaluator is not None:
            opened.callback(self._evaluator.close)
            check_same_data(self._evaluator.identity, "eval.data")
        self._profile = ProfileWindow(
            config.profile, config.run.folder / "profile", distributed.is_first()
        )
        opened.callback(self._profile.end)
        data = self._batches.loader.description
        validation = self._evaluator and self._evaluator.description
        display.say(*banner(config, _count_parameters(builder), mesh, data, validation))
        self._saving = Saving(config)
        self._newest_checkpoint = self._saving.newest
        opened.callback(self._close_checkpoints)
        self._groups = GroupWork.of(config, self._batches.loader)
        self._tuner = Tuner.of(config, self._batches.loader, mesh, self._groups)
        self._alarms = Alarms(config)
        check_state_memory(builder.abstract(), self._devices)
        if resume_from is None:
            self._state = builder.fresh()
        else:
            with self._watchdog.watch(f"reading the checkpoint of step {resume_from}"):
                self._state, place = self._saving.restore(resume_from, builder.abstract())
            self._batches.go_to(place)
            if self._tuner is not None:
                self._tuner.go_to(resume_from, place.get(_TUNING))
            self._alarms.go_to(place.get(_ALARMS))
            display.say(f"resuming from the checkpoint of step {resume_from}")
        start = config.profile.start
        if start is not None and start <= self._step:
            display.say(
                f"warning: no trace is written: profile.start = {start} is before the next step"
            )
        self._writers = open_writers(config, self._step) if distributed.is_first() else []
        for writer in self._writers:
            opened.callback(writer.close)
        # Opened last and closed first, because it writes.
        self._finished = FinishedSteps(
            config,
            self._devices,
            self._writers,
            display,
            self._alarms,
            self._watchdog,
            self._groups,
            self._tuner,
        )
        opened.callback(self._finished.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finishes all pending writes."""
        self._opened.__exit__(kind, error, trace)

    def train(self) -> History:
        """Takes all remaining steps, saves the last state, and returns the history of these steps.

        Raises:
            UserError: if too many consecutive steps are not finite.
            Stopped: after a stop signal; the state is saved.
        """
        total = self._config.run.steps
        batch = self._next_batch()
        programs = compile_programs(
            self._programs, (self._state, batch), self._devices, self._display
        )
        if self._evaluator is not None:
            self._display.say("compiling the evaluation ...")
            self._evaluator.compile(self._state, self._devices)
        self._display.start(self._step, total)
        self._finished.restart_clock()
        if self._signals is not None:
            self._signals.stop_after_a_step()
        while True:
            self._step += 1
            self._take_step(programs, batch)
            stopping = self._asked_to_stop() and self._step < total
            if self._saving.is_due(self._step) or (stopping and self._saving.ever):
                self._save()
            if self._step == total:
                break
            if stopping:
                self._finished.wait()
                self._display.stop()
                raise Stopped(self._with_way_to_resume("stop signal received"))
            batch = self._next_batch()
        history = self._finished.wait()
        self._display.stop()
        return history

    def _next_batch(self) -> dict[str, jax.Array]:
        with self._watchdog.watch(f"reading the batch of step {self._step + 1}"):
            batch = next(self._batches)
        if self._groups is not None:
            self._groups.begin()
        return batch if self._tuner is None else self._tuner.add_to(batch)

    def _take_step(self, programs: Programs, batch: dict[str, jax.Array]) -> None:
        """Dispatches the next step; returns when the previous one is reported."""
        if self._profile.begins(self._step):
            self._finished.wait()
            self._profile.begin()
            self._finished.restart_clock()
        audit, train_step, compared = self._config.audit, programs.train_step, None
        if self._step in self._config.dense_steps:  # nothing to audit
            train_step = programs.dense_step
        else:
            if programs.compare_gradients and (self._step - 1) % audit.gradient_interval == 0:
                self._finished.wait()  # keeps the comparison out of the step time
                started = time.perf_counter()
                with self._watchdog.watch(f"the gradient comparison before step {self._step}"):
                    compared = jax.device_get(programs.compare_gradients(self._state, batch))
                compared["gradient_seconds"] = np.float64(time.perf_counter() - started)
                self._finished.restart_clock()
            if programs.audited_step and (self._step - 1) % audit.interval == 0:
                train_step = programs.audited_step
        assert train_step is not None  # `make_programs` builds what the remaining steps need
        self._watchdog.begin(self._step)
        with self._profile.step(self._step):
            self._state, metrics = train_step(self._state, batch)
        if self._evaluator is not None and self._evaluator.is_due(self._step):
            evaluate = functools.partial(self._evaluator.measure, self._state)
            self._finished.add(metrics, compared, self._profile.open, evaluate)
            self._finished.wait()  # the next step donates the state
            self._finished.restart_clock()
        else:
            self._finished.add(metrics, compared, self._profile.open)
        if self._profile.ends(self._step):
            self._finished.wait()
            self._profile.end()
            steps = f"{self._config.profile.start} to {self._step}"
            self._display.say(f"trace of steps {steps} written to {_short(self._profile.folder)}")
            self._finished.restart_clock()

    def _save(self) -> None:
        # Saving waits for the devices anyway; keep it out of the step time.
        self._finished.wait()
        place = self._batches.state() | {_ALARMS: self._alarms.state()}
        if self._tuner is not None:
            place[_TUNING] = self._tuner.state()
        with self._watchdog.watch(f"saving the checkpoint of step {self._step}"):
            self._saving.save(self._step, self._state, place)
        self._finished.restart_clock()

    def _close_checkpoints(self) -> None:
        with self._watchdog.watch("writing the last checkpoint"):
            self._saving.close()

    def export(self) -> None:
        """Exports the state for Hugging Face transformers, if the configuration asks for it."""
        if self._config.checkpoint.export_hf:
            self._exported = export_state(self._config, self._builder, self._state)

    def wrote(self) -> list[str]:
        """Lists the files and folders that this process has written."""
        saved = self._saving.path(self._step) if self._saving.is_due(self._step) else None
        return [
            *(writer.where for writer in self._writers),
            *([] if saved is None else [_short(saved)]),
            *([] if self._exported is None else [str(self._exported)]),
        ]

    def _asked_to_stop(self) -> bool:
        """Whether to stop after this step; the same answer on all processes."""
        if jax.process_count() > 1:
            # JAX forwards the SIGTERM of any process, and makes all of them agree on a step.
            # Its counter must start at 1: after a signal before the first call, it stops at 1.
            return multihost_utils.reached_preemption_sync_point(self._step - self._start)
        return self._signals is not None and self._signals.requested

    def interrupted(self) -> str:
        """Returns the message after the user interrupts the run."""
        return self._with_way_to_resume("interrupted")

    def _with_way_to_resume(self, what: str) -> str:
        return f"{what} at step {self._step}; {self._way_to_resume()}"

    def _leave(self, sentence: str) -> None:
        exit_immediately(EXIT_STUCK, f"{sentence}; {self._way_to_resume()}")

    def _way_to_resume(self) -> str:
        newest = self._newest_checkpoint()
        return (
            "no checkpoint was saved yet (checkpoint.interval), so the same command will start "
            "from scratch"
            if newest is None
            else f"run the same command again to resume from the checkpoint of step {newest}"
        )


def _count_parameters(builder: StateBuilder) -> ParameterCount:
    sizes = {name: math.prod(x.shape) for name, x in builder.abstract().parameters.items()}
    return ParameterCount(sum(sizes.values()), sum(sizes[name] for name in builder.trainable))


def _short(path: Path) -> str:
    """Returns a path relative to the current folder, if it lies there."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
