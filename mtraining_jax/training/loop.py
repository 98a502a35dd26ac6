"""A whole run: checks, set-up, the loop, and what to tell at the end."""

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from mtraining_jax.config import Config
from mtraining_jax.errors import UserError
from mtraining_jax.reporting import banner
from mtraining_jax.reporting.metrics import (
    Memory,
    Record,
    Writer,
    open_writers,
    step_record,
)
from mtraining_jax.reporting.progress import Display
from mtraining_jax.training import distributed, parts, run_folder
from mtraining_jax.training.checkpoint import Checkpoints
from mtraining_jax.training.export import export_checkpoint, export_state
from mtraining_jax.training.memory_check import check_fits
from mtraining_jax.training.profile import ProfileWindow
from mtraining_jax.training.recall import make_recall
from mtraining_jax.training.state import StateBuilder, TrainState
from mtraining_jax.training.step import make_train_step


def run(config: Config) -> list[Record]:
    """Trains as the configuration says, from the newest checkpoint if there is one.

    All that can be checked is checked before the first step, and the output folder before any
    device is touched. Of several processes, the first prints and writes metrics.

    Args:
        config: a checked configuration; the platform of JAX is set already.

    Returns:
        The records of the steps that this call took, as in metrics.jsonl; on all processes.

    Raises:
        UserError: for anything that the user can mend, before the run or during it.
    """
    run_folder.check_writable(config)
    joined = distributed.initialize(config.distributed)
    try:
        with Display(enabled=distributed.is_first()) as display:
            records = _run(config, display)
    except UserError:  # on all processes
        if joined:
            distributed.shutdown()
        raise
    except Exception as error:
        if joined:
            distributed.leave(error)
        raise
    if joined:
        distributed.shutdown()
    return records


def _run(config: Config, display: Display) -> list[Record]:
    resume_from = run_folder.resume_step(config)
    if resume_from is not None and resume_from >= config.run.steps:
        display.say(*banner.already_complete(config, resume_from))
        if config.checkpoint.export_hf:
            display.say(f"  wrote      {export_checkpoint(config, resume_from)}")
        return []
    run_folder.use_compile_cache(config)
    _start_anew_or_go_on(config, resume_from, display)
    trainer = Trainer(config, resume_from, display)
    try:
        records = trainer.train()
        trainer.export()
    except KeyboardInterrupt as error:
        raise UserError(trainer.interrupted()) from error
    finally:
        trainer.close()
    display.say(*banner.summary(config, records, trainer.wrote()))
    return records


def _start_anew_or_go_on(config: Config, resume_from: int | None, display: Display) -> None:
    """Leaves the run's folder as this run needs it."""
    if distributed.is_first():
        aside = run_folder.move_aside(config) if resume_from is None else None
        if aside is not None:
            display.say(f"starting anew: what the last run of this name wrote is now in {aside}")
        config.run.folder.mkdir(parents=True, exist_ok=True)
    if jax.process_count() > 1:
        # The others must not look for checkpoints before the folder is as it should be.
        multihost_utils.sync_global_devices("the folder of the run is ready")


class Trainer:
    """The parts of one run, put together, at the first step or where a checkpoint stands.

    Args:
        config: of the run.
        resume_from: step of the checkpoint to go on from; None to start anew.
        display: where to print.

    Raises:
        UserError: if devices, data, model or checkpoint do not fit the configuration.
    """

    def __init__(self, config: Config, resume_from: int | None, display: Display) -> None:
        self.config, self.display = config, display
        self._over = False  # nothing more is told, of a step that was under way at the end
        self._closers: list[Callable[[], None]] = []
        try:
            self._set_up(resume_from)
        except BaseException:
            self.close()
            raise

    def _set_up(self, resume_from: int | None) -> None:
        config = self.config
        mesh = parts.build_mesh(config)
        layout = parts.build_layout(config)
        pattern = parts.build_pattern(config)
        batches = parts.Batches(config, mesh, layout)
        self._closers.append(batches.close)
        builder = StateBuilder(config, mesh)
        attention = parts.build_attention(config, mesh, layout, pattern)
        self._batches, self._builder = batches, builder
        inputs = parts.layer_inputs(pattern)
        self._train_step = make_train_step(config, builder, attention, mesh, inputs)
        with_recall = functools.partial(parts.build_attention, config, mesh, layout, pattern)
        self._measure_recall = make_recall(config, builder, with_recall, mesh, inputs)
        self._devices = mesh.local_devices
        self._profile = ProfileWindow(
            config.profile, config.run.folder / "profile", distributed.is_first()
        )
        self._closers.append(self._profile.end)
        self.display.say(*banner.banner(config, builder, mesh, batches.loader.description))
        self._checkpoints = Checkpoints(
            run_folder.checkpoint_folder(config),
            keep=config.checkpoint.keep,
            async_save=config.checkpoint.async_save,
        )
        self._closers.append(self._checkpoints.close)
        self._state: TrainState
        if resume_from is None:
            self._state = builder.fresh()
        else:
            self._state, place = self._checkpoints.restore(
                resume_from, builder.abstract(), config
            )
            batches.go_to(place)
            self.display.say(f"going on from the checkpoint of step {resume_from}")
        self._step = resume_from or 0
        start = config.profile.start
        if start is not None and start <= self._step:
            self.display.say(f"no trace: profile.start = {start} is before the next step")
        self._exported: Path | None = None
        self._writers: list[Writer] = []
        if distributed.is_first():
            self._writers = open_writers(config, self._step)
            self._closers += [writer.close for writer in self._writers]
        # The last to be made and so the first to be closed: it writes.
        self._watcher = ThreadPoolExecutor(1, "watcher")
        self._closers.append(functools.partial(self._watcher.shutdown, wait=True))

    def train(self) -> list[Record]:
        """Takes all steps that are left, and saves the last state.

        Raises:
            UserError: if too many steps in a row are not finite.
        """
        config, total = self.config, self.config.run.steps
        records: list[Record] = []
        batch = next(self._batches)
        train_step, measure_recall = self._compile(batch)
        pending: Future[Record] | None = None  # of a step that the devices work on
        self.display.start(self._step, total)
        self._clock = time.perf_counter()
        while True:
            self._step += 1
            if self._profile.begins(self._step):
                self._wait(pending, records)
                pending = None
                self._profile.begin()
                self._clock = time.perf_counter()
            recall = None
            if measure_recall and (self._step - 1) % config.metrics.recall_every == 0:
                recall = np.asarray(measure_recall(self._state, batch))
            with self._profile.step(self._step):
                self._state, metrics = train_step(self._state, batch)
            # Starting a step may take until the devices have nearly done it. Another thread tells
            # of the step before as soon as they have done that.
            started = self._watcher.submit(self._finish, metrics, recall, self._profile.open)
            self._wait(pending, records)
            pending = started
            if self._profile.ends(self._step):
                self._wait(pending, records)
                pending = None
                self._profile.end()
                steps = f"{config.profile.start} to {self._step}"
                self.display.say(f"trace of steps {steps}: {_short(self._profile.folder)}")
                self._clock = time.perf_counter()
            if self._is_saved(self._step):
                # Saving waits for the devices anyway; its time is not that of a step.
                self._wait(pending, records)
                pending = None
                place = self._batches.state()
                self._checkpoints.save(self._step, self._state, place, config)
                self._clock = time.perf_counter()
            if self._step == total:
                break
            batch = next(self._batches)
        self._wait(pending, records)
        self.display.stop()
        return records

    def export(self) -> None:
        """Writes the state for Hugging Face transformers, if the configuration asks for it."""
        if self.config.checkpoint.export_hf:
            self._exported = export_state(self.config, self._builder, self._state)

    def wrote(self) -> list[str]:
        """What this process has written, and where."""
        newest = self._checkpoints.folder / str(self._step)
        saved = [_short(newest)] if self._is_saved(self._step) else []
        exported = [] if self._exported is None else [str(self._exported)]
        return [*(writer.where for writer in self._writers), *saved, *exported]

    def _is_saved(self, step: int) -> bool:
        """Whether the state after this step goes into a checkpoint."""
        checkpoint = self.config.checkpoint
        if step == self.config.run.steps and checkpoint.last_step:
            return True
        return bool(checkpoint.every_steps) and step % checkpoint.every_steps == 0

    def interrupted(self) -> str:
        """What to say when the user stops the run."""
        newest = self._checkpoints.newest()
        return f"interrupted at step {self._step}; " + (
            "there is no checkpoint yet (checkpoint.every_steps), so the same command starts anew"
            if newest is None
            else f"the same command goes on from the checkpoint of step {newest}"
        )

    def close(self) -> None:
        """Finishes all that is being written; the first error of several is raised."""
        self._over = True
        closers, self._closers = self._closers[::-1], []
        errors = []
        for close in closers:
            try:
                close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _compile(
        self, batch: dict[str, jax.Array]
    ) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        """The training step, and what measures recall if that is asked for."""
        self.display.say("compiling the training step ...")
        begin = time.perf_counter()
        train_step = self._train_step.lower(self._state, batch).compile()
        measure_recall = None
        # Dense attention keeps all of the mass.
        if self.config.metrics.recall_every and self.config.sparsity.settings.sparse:
            measure_recall = self._measure_recall.lower(self._state, batch).compile()
        self.display.say(f"compiled in {time.perf_counter() - begin:.1f} s")
        check_fits(train_step, self._devices)
        return train_step, measure_recall

    def _wait(self, pending: Future[Record] | None, records: list[Record]) -> None:
        """Takes the record of a step when the devices have done it, if there is one."""
        if pending is not None:
            records.append(pending.result())

    def _finish(
        self, metrics: dict[str, Any], recall: np.ndarray | None, profiled: bool
    ) -> Record:
        """Waits for a step, tells its metrics, and stops the run if it cannot go on."""
        jax.block_until_ready(metrics)
        now = time.perf_counter()
        metrics = jax.device_get(metrics)
        seconds, self._clock = now - self._clock, now
        record = step_record(
            metrics,
            seconds,
            self.config,
            device_kind=self._devices[0].device_kind,
            memory=Memory.now(self._devices),
        )
        if profiled:
            record["profiled"] = True  # and slower for it
        if recall is not None:
            record["recall"] = float(np.mean(recall))
            record["recall_per_layer"] = recall.tolist()
        if self._over:
            return record
        for writer in self._writers:
            writer.write(record)
        step, log_every = record["step"], self.config.run.log_every
        self.display.step(record, step % log_every == 0 or step in (1, self.config.run.steps))
        self._check_finite(metrics, record)
        return record

    def _check_finite(self, metrics: dict[str, Any], record: Record) -> None:
        in_row, allowed = int(metrics["skipped_in_row"]), self.config.optimizer.max_skipped_steps
        if in_row <= allowed:
            return
        self._over = True
        what = "gradient norm" if record["loss"] is not None else "loss"
        value = metrics["grad_norm"] if record["loss"] is not None else metrics["loss"]
        raise UserError(
            f"the {what} is {float(value)} at step {record['step']}, and {in_row} steps in a row "
            f"were not finite, more than optimizer.max_skipped_steps = {allowed}; a lower "
            "optimizer.lr, a longer optimizer.warmup_steps or other data may help"
        )


def _short(path: Path) -> str:
    """A path as seen from here, where that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
