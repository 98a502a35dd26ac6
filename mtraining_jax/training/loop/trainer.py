"""The training loop, and the parts of a run."""

import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import jax
import optax
from jax.experimental import multihost_utils

from mtraining_jax.callbacks import Callback, Record, Result, Run, State
from mtraining_jax.config import Config
from mtraining_jax.data.documents import pretokenize_hint
from mtraining_jax.data.loader import Loader
from mtraining_jax.reporting.banner import banner
from mtraining_jax.reporting.goodput import Goodput
from mtraining_jax.reporting.history import History
from mtraining_jax.reporting.progress import Display
from mtraining_jax.reporting.writers import Writers
from mtraining_jax.training.build import build_layout, build_mesh, build_pattern
from mtraining_jax.training.checkpoint.end_tokens import END_TOKENS, end_tokens
from mtraining_jax.training.device_batches import DeviceBatches
from mtraining_jax.training.guard.guard import Guard, TakenStep
from mtraining_jax.training.loop.profile import ProfileWindow
from mtraining_jax.training.loop.programs import compile_programs, make_programs
from mtraining_jax.training.loop.reporter import DispatchedStep, Reporter
from mtraining_jax.training.loop.saving import Saving, by_key
from mtraining_jax.training.loop.watchdog import HangWatchdog
from mtraining_jax.training.memory_check import check_state_memory
from mtraining_jax.training.processes import distributed
from mtraining_jax.training.processes.agreement import check_same_data, wait_for_all_processes
from mtraining_jax.training.processes.peers import PeerWatch
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.tools import Tools
from mtraining_jax.training.validation import Evaluator
from mtraining_jax.utils.signals import EXIT_FAILED, Stopped, StopSignals, exit_immediately

# Keys of a checkpoint next to the position in the data and those of callbacks.
_GOODPUT, _GUARD = "goodput", "guard"


@dataclasses.dataclass(frozen=True)
class Given:
    """What a caller adds to a configuration; arguments of `fit`."""

    data: Iterator[Mapping[str, Any]] | None = None
    optimizer: optax.GradientTransformation | None = None
    callbacks: Sequence[Callback] = ()
    state: State | None = None


class _WallTime(Callback):
    """Adds to each record where the time went, in all processes."""

    def __init__(self, goodput: Goodput, peers: PeerWatch | None) -> None:
        self._goodput, self._peers = goodput, peers

    def step(self, record: Record) -> Record:
        del record
        process_timings: list[Mapping[str, float]] = [self._goodput.step_timing]
        if self._peers is not None:
            others = self._peers.statuses
            process_timings += [others.get(n, {}) for n in range(1, jax.process_count())]
        return self._goodput.record(process_timings)


class Trainer:
    """One run, from its first step or from a checkpoint (`resume_from`) to its last step.

    `tools` are those of the configuration, `given` the arguments of `fit`. `signals` are the stop
    signals of the command; None for a call from Python. `peers` watches the other processes, if
    any. `goodput` counts from the start. `copies` is called with each checkpoint. `opened` closes
    what the run opens, when everything is written.
    """

    def __init__(
        self,
        config: Config,
        tools: Tools,
        given: Given,
        resume_from: int | None,
        display: Display,
        signals: StopSignals | None,
        peers: PeerWatch | None,
        goodput: Goodput,
        copies: Callback,
        opened: ExitStack,
    ) -> None:
        self._config, self._tools, self._display = config, tools, display
        self._signals, self._peers = signals, peers
        self._goodput, self._data_seconds = goodput, 0.0
        self._start = self._step = resume_from or 0
        self._newest_checkpoint: Callable[[bool], int | None] = lambda waits: resume_from
        mesh, layout, pattern = build_mesh(config), build_layout(config), build_pattern(config)
        first = distributed.is_first()
        self._run = Run(config, mesh, first, display.say)
        # Ends the process only for the command; the caller of `fit` may need it. It is closed
        # last, when nothing waits for devices or for other processes.
        leave = self._leave if signals else None
        watchdog = HangWatchdog(config.run.step_timeout_seconds, display.say, leave)
        self._watchdog = opened.enter_context(closing(watchdog))
        if peers is not None:
            peers.advice = functools.partial(self.way_to_resume, waits=False)
            watchdog.slowest = peers.slowest
            peers.status = lambda: {
                "progress": watchdog.progress,
                "phase": watchdog.phase(),
                **goodput.step_timing,
            }
        if (advice := pretokenize_hint(config.data)) is not None:
            display.say(advice)
        batches = DeviceBatches(config, mesh, layout, given.data, tools.balance)
        self._batches = opened.enter_context(closing(batches))
        loader = self._batches.loader
        check_same_data(loader.identity, "data")
        self._builder = builder = StateBuilder(config, mesh, given.optimizer)
        terms = [x.loss for x in given.callbacks if type(x).loss is not Callback.loss]
        how = self._step, terms, tools.observer, tools.by_length
        self._programs = make_programs(config, builder, mesh, layout, pattern, *how)
        self._history, found = History(), list[Callback]()

        def add(callback: Callback) -> None:
            found.append(callback)
            opened.callback(callback.close)

        for callback in tools.before(loader if isinstance(loader, Loader) else None, mesh):
            add(callback)
        validation = None
        if config.eval.interval:
            add(evaluator := Evaluator(config, builder, mesh))
            check_same_data(evaluator.loader.identity, "eval.data")
            validation = evaluator.description
        for callback in given.callbacks:
            add(callback)
        self._profile = ProfileWindow(config.profile, config.run.folder / "profile", first)
        opened.callback(self._profile.end)
        data = loader.description_for(config.run.steps)
        display.say(*banner(config, builder.count_parameters(), mesh, data, validation))
        self._guard = Guard(config, builder) if config.guard.enabled else None
        self._unsettled: list[TakenStep] = []  # those that may be held
        self._saving = Saving(config, resume_from, watchdog, opened)
        self._newest_checkpoint = self._saving.newest
        check_state_memory(builder.abstract(), mesh.local_devices)
        add(_WallTime(goodput, peers))
        add(self._history)
        self._saved, self._end_tokens = by_key(found), end_tokens(config)
        if resume_from is not None:
            self._restore(resume_from)
        elif given.state is not None:
            self._state = builder.continued(given.state)
        else:
            self._state = builder.fresh()
        if (start := config.profile.start) is not None and start <= self._step:
            display.say(
                f"warning: no trace is written: profile.start = {start} is before the next step"
            )
        self._places: list[str] = []
        if first:
            add(writers := Writers(config, self._step))
            self._places += writers.places
            add(display)
            for callback in tools.after() if writers.places else ():
                add(callback)
        self._callbacks = [*found, copies]
        self._freezes = not gc.get_freeze_count()  # unfreezing would undo what the caller froze
        if self._freezes:
            opened.callback(gc.unfreeze)
        # Opened last and closed first, because it writes.
        reporter = Reporter(self._run, self._callbacks, watchdog, goodput)
        self._reporter = opened.enter_context(closing(reporter))

    def _restore(self, step: int) -> None:
        self._state, extras = self._saving.restore(self._builder, step, self._display.say)
        self._batches.loader.set_state(extras)
        for key, callback in self._saved.items():
            callback.restore(step, extras.get(key))
        if self._guard is not None:
            self._guard.go_to(extras.get(_GUARD))
        self._goodput.go_to(extras.get(_GOODPUT))
        self._end_tokens = end_tokens(self._config, extras.get(END_TOKENS, ()))

    def train(self) -> Result:
        """Takes all remaining steps."""
        total, batch = self._config.run.steps, self._prepare()
        while True:
            self._step += 1
            self._take_step(batch)
            signaled = self._asked_to_stop() and self._step < total
            why = self._run.stops_after(self._reported)
            early = self._step < total and (signaled or why is not None)
            finished = self._step == total or (early and not signaled)
            if self._saving.is_due(self._step) or (early and self._saving.saves):
                self._save(local=False, finished=finished)
            elif self._saving.is_due_locally(self._step):
                self._save(local=True, finished=finished)
            if early or self._step == total:
                break
            batch = self._next_batch()
        self._settle(0)
        self._reporter.wait()
        self._display.close()
        if signaled:
            raise Stopped(self.with_way_to_resume("stop signal received"))
        if why is not None:
            self._display.say(f"stopped early after step {self._step}: {why}")
        result = Result(list(self._history.last), self._state, why, self._results())
        for callback in self._callbacks:
            callback.end(result)
        return result

    @property
    def history(self) -> History:
        return self._history

    def _prepare(self) -> Mapping[str, Any]:
        """Compiles, waits for the other processes, and returns the first batch."""
        self._goodput.started()
        arguments = self._state, (batch := self._next_batch())
        if self._guard is not None:
            arguments += (self._guard.start(self._state),)
        with self._reporter.paused("compile"), self._watchdog.watch("compiling", limited=False):
            devices = self._builder.mesh.local_devices
            self._compiled = compile_programs(self._programs, arguments, devices, self._display)
            for callback in self._callbacks:
                callback.start(self._run, self._state)
        with self._watchdog.watch("waiting for the other processes to compile", limited=False):
            wait_for_all_processes()
        if self._freezes:
            # Otherwise each process pauses at other steps, for 0.16 s to visit 300,000 objects.
            gc.collect()
            gc.freeze()
        if self._step == 0:
            self._reporter.report_initial(self._state)
        self._reporter.restart_clock()
        if self._signals is not None:
            self._signals.stop_after_a_step()
        return batch

    def _next_batch(self) -> Mapping[str, Any]:
        with self._watchdog.watch(f"reading the batch of step {self._step + 1}"):
            begin = time.perf_counter()
            batch: Mapping[str, Any] = next(self._batches)
            self._data_seconds = time.perf_counter() - begin
        for callback in self._callbacks:
            batch = callback.batch(self._step + 1, batch)
        return batch

    def _take_step(self, batch: Mapping[str, Any]) -> None:
        """Dispatches the next step; returns when the previous one is reported."""
        if self._profile.begins(self._step):
            with self._reporter.paused():
                self._profile.begin()
        name, interval = "train_step", self._config.audit.interval
        if self._step in self._config.dense_steps:  # nothing to audit
            name = "dense_step"
        elif "audited_step" in self._compiled and (self._step - 1) % interval == 0:
            name = "audited_step"
        wanted = any([callback.wants_state(self._step) for callback in self._callbacks])
        self._dispatch(step := TakenStep(self._step, name, batch, wanted))
        self._unsettled.append(step)
        checks = self._guard is not None and self._guard.checks(self._step)
        self._settle(0 if checks or wanted else 1)
        self._reported = self._step - 1
        if self._profile.ends(self._step):
            with self._reporter.paused():
                self._profile.end()
                first, folder = self._config.profile.start, _short(self._profile.folder)
                self._display.say(f"trace of steps {first} to {self._step} written to {folder}")
        elif wanted:
            self._reporter.wait()  # the next step donates the state
            self._reporter.restart_clock()
            self._reported = self._step

    def _dispatch(self, step: TakenStep) -> None:
        """Dispatches a pass of a step."""
        guarded = () if self._guard is None else (self._guard.inputs(step),)
        self._watchdog.begin(step.number)
        begun = time.perf_counter()
        with jax.profiler.StepTraceAnnotation("train_step", step_num=step.number):
            program = self._compiled[step.program]
            self._state, metrics = program(self._state, step.batch, *guarded)
        if self._guard is not None:
            self._guard.dispatched(step, metrics)
        state = self._state if step.wants_state else None
        profiled, data = self._profile.open, self._data_seconds
        how = step.notes, step.program, begun, data, profiled, state
        self._reporter.add(DispatchedStep(metrics, *how))

    def _settle(self, keep: int) -> None:
        """Repeats held steps until at most the newest `keep` ones may be held."""
        while len(self._unsettled) > keep:
            step, *later = self._unsettled
            self._unsettled, repeated = later, False
            while self._guard is not None and self._guard.holds(step):
                self._dispatch(step)
                repeated = True
            if repeated:  # those after a step that is held are held too
                for other in later:
                    self._dispatch(other)

    def _save(self, *, local: bool, finished: bool) -> None:
        self._settle(0)
        # Saving waits for the devices anyway.
        with self._reporter.paused("checkpoint"):
            extras = self._batches.loader.get_state()
            for key, callback in self._saved.items():
                if (kept := callback.save()) is not None:
                    extras[key] = kept
            if self._guard is not None:
                extras[_GUARD] = self._guard.state()
            extras[END_TOKENS] = self._end_tokens
            extras[_GOODPUT] = self._goodput.state(finished=finished)
            self._saving.save(self._step, self._state, extras, local=local)
            if not local:
                for callback in self._callbacks:
                    callback.saved(self._step)

    def _results(self) -> list[str]:
        """Exports the model if asked to, and returns the places of all results."""
        places = [*self._places]
        if self._saving.newest(True) == self._step:
            places.append(_short(Path(self._saving.place(self._step))))
        if self._config.checkpoint.export_hf:
            eos = self._end_tokens
            places += map(str, self._tools.export(self._builder, self._state, eos))
        return places

    def _asked_to_stop(self) -> bool:
        """Whether to stop after this step; the same answer on all processes."""
        if jax.process_count() > 1:
            # JAX forwards the SIGTERM of any process, and makes all of them agree on a step.
            # Its counter must start at 1: after a signal before the first call, it stops at 1.
            return multihost_utils.reached_preemption_sync_point(self._step - self._start)
        return self._signals is not None and self._signals.requested

    def with_way_to_resume(self, what: str) -> str:
        """Returns a message that the run ends, with its step and how to resume."""
        return f"{what} at step {self._step}; {self.way_to_resume()}"

    def _leave(self, sentence: str) -> None:
        if self._peers is not None:
            self._peers.announce(sentence)
        exit_immediately(EXIT_FAILED, f"{sentence}; {self.way_to_resume(waits=False)}")

    def way_to_resume(self, *, waits: bool = True) -> str:
        """Returns what to do after the run ends, by the newest checkpoint.

        `waits`: whether the process waits for what is still being written, before it ends.
        """
        newest = self._newest_checkpoint(waits)
        if newest is None:
            return (
                "no checkpoint was saved yet (checkpoint.interval), so the same command will start "
                "from scratch"
            )
        return f"run the same command again to resume from the checkpoint of step {newest}"


def _short(path: Path) -> str:
    cwd = Path.cwd()
    return str(path.relative_to(cwd) if path.is_relative_to(cwd) else path)
