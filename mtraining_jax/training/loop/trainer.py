"""The training loop, and the parts of a run."""

import functools
import gc
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from mtraining_jax.attention.picture import check_pictures
from mtraining_jax.config import Config
from mtraining_jax.data.tokenizing import pretokenize_hint
from mtraining_jax.reporting.alarms import Alarms
from mtraining_jax.reporting.banner import banner
from mtraining_jax.reporting.goodput import Goodput
from mtraining_jax.reporting.history import History
from mtraining_jax.reporting.progress import Display
from mtraining_jax.reporting.writers import open_writers
from mtraining_jax.training.build import build_layout, build_mesh, build_pattern
from mtraining_jax.training.checkpoint import LOWEST_DENSITY, Checkpoints, read_state, run_folder
from mtraining_jax.training.checkpoint.end_tokens import END_TOKENS, end_tokens
from mtraining_jax.training.checkpoint.export import export_state
from mtraining_jax.training.checkpoint.local import open_local, read_local_state
from mtraining_jax.training.device_batches import DeviceBatches
from mtraining_jax.training.guard.guard import Guard, TakenStep
from mtraining_jax.training.loop.finished_steps import DispatchedStep, FinishedSteps
from mtraining_jax.training.loop.profile import ProfileWindow
from mtraining_jax.training.loop.programs import compile_programs, make_programs
from mtraining_jax.training.loop.resumed import resume_notes
from mtraining_jax.training.loop.watchdog import HangWatchdog
from mtraining_jax.training.memory_check import check_state_memory
from mtraining_jax.training.processes import distributed
from mtraining_jax.training.processes.agreement import check_same_data, wait_for_all_processes
from mtraining_jax.training.processes.peers import PeerWatch
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.tuning.replica_load import ReplicaLoad, replicas_differ
from mtraining_jax.training.tuning.tuner import Tuner
from mtraining_jax.training.validation import Evaluator
from mtraining_jax.utils.signals import EXIT_FAILED, Stopped, StopSignals, exit_immediately

# Keys of a checkpoint next to the position in the data.
_TUNING, _ALARMS, _GOODPUT, _GUARD = "sparsity.tune", "audit.alarms", "goodput", "guard"


class Trainer:
    """One run, from its first step or from a checkpoint (`resume_from`) to its last step.

    `signals` are the stop signals of the command; None for a call from Python. `peers` watches the
    other processes, if any. `goodput` counts from the start. `copy_files` is called with each
    checkpoint. `opened` closes what the run opens, when everything is written.
    """

    def __init__(
        self,
        config: Config,
        resume_from: int | None,
        display: Display,
        signals: StopSignals | None,
        peers: PeerWatch | None,
        goodput: Goodput,
        copy_files: Callable[[], None],
        opened: ExitStack,
    ) -> None:
        self._config, self._display, self._signals, self._peers = config, display, signals, peers
        self._goodput, self._data_seconds = goodput, 0.0
        self._copy_files = copy_files
        self._start = self._step = resume_from or 0
        self._newest_checkpoint: Callable[[bool], int | None] = lambda waits: resume_from
        if config.audit.masks:
            check_pictures("audit.masks")
        mesh, layout, pattern = build_mesh(config), build_layout(config), build_pattern(config)
        # Ends the process only for the command; the caller of `train` may need it. It is closed
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
                **goodput.of_steps,
            }
        if (advice := pretokenize_hint(config.data)) is not None:
            display.say(advice)
        self._batches = opened.enter_context(closing(DeviceBatches(config, mesh, layout)))
        loader = self._batches.loader
        check_same_data(loader.identity, "data")
        self._builder = builder = StateBuilder(config, mesh)
        self._programs = make_programs(config, builder, mesh, layout, pattern, self._step)
        self._evaluator = validation = None
        if config.eval.interval:
            self._evaluator = opened.enter_context(closing(Evaluator(config, builder, mesh)))
            check_same_data(self._evaluator.loader.identity, "eval.data")
            validation = self._evaluator.description
        first = distributed.is_first()
        self._profile = ProfileWindow(config.profile, config.run.folder / "profile", first)
        opened.callback(self._profile.end)
        data = loader.description_for(config.run.steps)
        display.say(*banner(config, builder.count_parameters(), mesh, data, validation))
        folder, keep = run_folder.checkpoint_folder(config), config.checkpoint.keep
        self._checkpoints = Checkpoints(folder, keep=keep, async_save=config.checkpoint.async_save)
        self._local: Checkpoints | None = None
        self._newest_checkpoint = self._newest_saved
        opened.callback(self._close_checkpoints)
        self._replicas: ReplicaLoad | None = None
        if replicas_differ(config):
            tunes = config.sparsity.tune != "none"
            self._replicas = Tuner(config, loader, mesh) if tunes else ReplicaLoad(config, loader)
        self._alarms = Alarms(config)
        self._guard = Guard(config, builder) if config.guard.enabled else None
        self._unsettled: list[TakenStep] = []  # those that may be held
        self._end_tokens, self._lowest_density = end_tokens(config), 1.0
        check_state_memory(builder.abstract(), mesh.local_devices)
        if resume_from is None:
            self._state = builder.fresh()
        else:
            self._restore(folder, resume_from)
        if config.checkpoint.local_dir is not None:
            self._local = opened.enter_context(closing(open_local(config, resume_from)))
        if (start := config.profile.start) is not None and start <= self._step:
            display.say(
                f"warning: no trace is written: profile.start = {start} is before the next step"
            )
        self._writers = writers = open_writers(config, self._step) if first else []
        for writer in writers:
            opened.callback(writer.close)
        self._freezes = not gc.get_freeze_count()  # unfreezing would undo what the caller froze
        if self._freezes:
            opened.callback(gc.unfreeze)
        devices, alarms, replicas = mesh.local_devices, self._alarms, self._replicas
        finished = FinishedSteps(
            config, devices, writers, display, alarms, watchdog, replicas, goodput, self._of_steps
        )
        # Opened last and closed first, because it writes.
        self._finished = opened.enter_context(closing(finished))

    def _restore(self, folder: Path, step: int) -> None:
        is_local = step != self._checkpoints.newest()
        with self._watchdog.watch(f"reading the checkpoint of step {step}"):
            abstract, base = self._builder.abstract(), self._builder.base
            if is_local:
                self._state, record = read_local_state(self._config, step, abstract, base)
            else:
                self._state, record = read_state(folder, step, abstract, self._config, base)
        place = record["loader"]
        self._batches.loader.set_state(place)
        if isinstance(self._replicas, Tuner):
            self._replicas.go_to(step, place.get(_TUNING))
        self._alarms.go_to(place.get(_ALARMS))
        if self._guard is not None:
            self._guard.go_to(place.get(_GUARD))
        self._goodput.go_to(place.get(_GOODPUT))
        self._end_tokens = end_tokens(self._config, place.get(END_TOKENS, ()))
        self._lowest_density = place.get(LOWEST_DENSITY, 0.0)  # unknown in older checkpoints
        where = " in checkpoint.local_dir" if is_local else ""
        self._display.say(f"resuming from the checkpoint of step {step}{where}")
        self._display.say(*resume_notes(folder / str(step), record["config"], self._config, step))

    def train(self) -> tuple[History, list[str]]:
        """Takes all remaining steps; returns their history, and the places of all results."""
        config, total = self._config, self._config.run.steps
        devices = self._builder.mesh.local_devices
        self._goodput.started()
        arguments = self._state, (batch := self._next_batch())
        if self._guard is not None:
            arguments += (self._guard.start(self._state),)
        with self._finished.paused("compile"), self._watchdog.watch("compiling", limited=False):
            programs = compile_programs(self._programs, arguments, devices, self._display)
            if self._evaluator is not None:
                self._display.say("compiling the evaluation ...")
                self._evaluator.compile(self._state, devices)
        with self._watchdog.watch("waiting for the other processes to compile", limited=False):
            wait_for_all_processes()
        if self._freezes:
            # Otherwise each process pauses at other steps, for 0.16 s to visit 300,000 objects.
            gc.collect()
            gc.freeze()
        if self._evaluator is not None and self._step == 0:
            self._finished.add_validation(functools.partial(self._evaluator.measure, self._state))
        self._display.start(self._step, total)
        self._finished.restart_clock()
        if self._signals is not None:
            self._signals.stop_after_a_step()
        saves = bool(config.checkpoint.interval) or config.checkpoint.last_step
        self._compiled = programs
        while True:
            self._step += 1
            self._take_step(batch)
            stopping = self._asked_to_stop() and self._step < total
            if self._save_is_due() or (stopping and saves):
                self._save(self._checkpoints)
            elif self._local and self._step % config.checkpoint.local_interval == 0:
                self._save(self._local)
            if self._step == total or stopping:
                break
            batch = self._next_batch()
        self._settle(0)
        history = self._finished.wait()
        self._display.stop()
        if stopping:
            raise Stopped(self.with_way_to_resume("stop signal received"))
        return history, self._results()

    def _next_batch(self) -> Mapping[str, jax.Array]:
        with self._watchdog.watch(f"reading the batch of step {self._step + 1}"):
            begin = time.perf_counter()
            batch = next(self._batches)
            self._data_seconds = time.perf_counter() - begin
        return batch if self._replicas is None else self._replicas.begin(batch)

    def _take_step(self, batch: Mapping[str, jax.Array]) -> None:
        """Dispatches the next step; returns when the previous one is reported."""
        if self._profile.begins(self._step):
            with self._finished.paused():
                self._profile.begin()
        name, interval = "train_step", self._config.audit.interval
        if self._step in self._config.dense_steps:  # nothing to audit
            name = "dense_step"
        elif "audited_step" in self._compiled and (self._step - 1) % interval == 0:
            name = "audited_step"
        evaluates = self._evaluator is not None and self._evaluator.is_due(self._step)
        self._dispatch(step := TakenStep(self._step, name, batch, evaluates))
        self._unsettled.append(step)
        checks = self._guard is not None and self._guard.checks(self._step)
        self._settle(0 if checks or evaluates else 1)
        if self._profile.ends(self._step):
            with self._finished.paused():
                self._profile.end()
                first, folder = self._config.profile.start, _short(self._profile.folder)
                self._display.say(f"trace of steps {first} to {self._step} written to {folder}")
        elif evaluates:
            self._finished.wait()  # the next step donates the state
            self._finished.restart_clock()

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
        evaluate = None
        if self._evaluator is not None and step.evaluates:
            evaluate = functools.partial(self._evaluator.measure, self._state)
        profiled, data = self._profile.open, self._data_seconds
        how = step.notes, step.program, begun, data, profiled, evaluate
        self._finished.add(DispatchedStep(metrics, *how))

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

    def _save_is_due(self) -> bool:
        checkpoint = self._config.checkpoint
        if self._step == self._config.run.steps and checkpoint.last_step:
            return True
        return bool(checkpoint.interval) and self._step % checkpoint.interval == 0

    def _save(self, checkpoints: Checkpoints) -> None:
        self._settle(0)
        what = f"saving the checkpoint of step {self._step}"
        # Saving waits for the devices anyway.
        with self._finished.paused("checkpoint"), ExitStack() as watched:
            # Writing may be slow. If a process is lost meanwhile, the others notice it.
            with self._watchdog.watch("writing the previous checkpoint", limited=False):
                checkpoints.wait()
            limited = self._config.checkpoint.async_save
            watched.enter_context(self._watchdog.watch(what, limited=limited))
            place = self._batches.loader.get_state() | {_ALARMS: self._alarms.state()}
            if self._guard is not None:
                place[_GUARD] = self._guard.state()
            place[END_TOKENS] = self._end_tokens
            lowest = self._finished.wait().lowest_density
            place[LOWEST_DENSITY] = min(lowest, self._lowest_density)
            place[_GOODPUT] = self._goodput.state(finished=self._step == self._config.run.steps)
            if isinstance(self._replicas, Tuner):
                place[_TUNING] = self._replicas.state()
            checkpoints.save(self._step, self._state, place, self._config)
            if checkpoints is self._checkpoints:
                self._copy_files()

    def _close_checkpoints(self) -> None:
        with self._watchdog.watch("writing the last checkpoint", limited=False):
            self._checkpoints.close()

    def _of_steps(self) -> list[Mapping[str, float]]:
        """The newest statistics of steps of all processes, for process 0."""
        own = self._goodput.of_steps
        if self._peers is None:
            return [own]
        others = self._peers.statuses
        return [own, *(others.get(number, {}) for number in range(1, jax.process_count()))]

    def _results(self) -> list[str]:
        """Exports the model if asked to, and returns the places of all results."""
        places = [writer.where for writer in self._writers]
        if self._save_is_due():
            places.append(_short(self._checkpoints.folder / str(self._step)))
        if self._config.checkpoint.export_hf:
            eos = self._end_tokens
            places += map(str, export_state(self._config, self._builder, self._state, eos))
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

    def _newest_saved(self, waits: bool) -> int | None:
        all_checkpoints = [x for x in (self._checkpoints, self._local) if x is not None]
        steps = [x.newest() if waits else x.newest_complete() for x in all_checkpoints]
        return max((step for step in steps if step is not None), default=None)

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
