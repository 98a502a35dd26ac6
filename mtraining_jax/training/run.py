"""A complete run, with checks, connection to other processes, and a final summary."""

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
from jax.errors import JaxRuntimeError
from jax.experimental.compilation_cache import compilation_cache

from mtraining_jax.callbacks import Callback, Result
from mtraining_jax.config import Config, validate
from mtraining_jax.config.load import with_bos, with_steps
from mtraining_jax.data.sources.given import Given as GivenSource
from mtraining_jax.data.tokenizer import make_tokenizer
from mtraining_jax.reporting.banner import banner
from mtraining_jax.reporting.goodput import Goodput
from mtraining_jax.reporting.progress import Display
from mtraining_jax.reporting.summary import already_complete, summary
from mtraining_jax.training.build import build_layout, build_mesh, build_pattern
from mtraining_jax.training.checkpoint import read_record, run_folder
from mtraining_jax.training.checkpoint.bucket import BucketCopy
from mtraining_jax.training.checkpoint.local import newest_local_step
from mtraining_jax.training.checkpoint.run_lock import holder, only_run_in
from mtraining_jax.training.checkpoint.same_model import changed_fields, check_same_model
from mtraining_jax.training.device_batches import DeviceBatches
from mtraining_jax.training.loop.trainer import Given, Trainer
from mtraining_jax.training.loop.watchdog import HangWatchdog
from mtraining_jax.training.memory_check import check_pool_error
from mtraining_jax.training.processes import distributed
from mtraining_jax.training.processes.agreement import (
    assert_same_on_all_processes,
    check_same_configuration,
    check_same_data,
    run_on_process_0,
)
from mtraining_jax.training.processes.peers import PeerWatch
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.tools import Tools
from mtraining_jax.training.validation import Evaluator
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.jax_platform import check_devices
from mtraining_jax.utils.signals import StopSignals

_SHARED = "run.output_dir must be on a file system that all hosts share"


def run(
    config: Config,
    make_tools: Callable[[Config], Tools],
    given: Given,
    signals: StopSignals | None = None,
) -> Result:
    """Runs `mtraining_jax.fit` with the tools of a configuration; ends at a stop signal.

    Without `signals` of the command only SIGTERM ends it early, with several processes.

    Raises:
        UserError: for any error that the user can correct, before or during the run.
        Stopped: after a stop signal, when everything is written.
    """
    goodput = Goodput()
    config = _with_given(config, given)
    run_folder.check_writable(config)
    with distributed.joined(config.distributed) as peers:
        if peers is not None and signals is not None:
            signals.stop_together()
        check_devices()
        with contextlib.ExitStack() as opened:
            display = Display(enabled=distributed.is_first())
            opened.callback(display.close)
            check_same_configuration(config)
            return _run(config, make_tools, given, display, signals, peers, goodput, opened)


def _run(
    config: Config,
    make_tools: Callable[[Config], Tools],
    given: Given,
    display: Display,
    signals: StopSignals | None,
    peers: PeerWatch | None,
    goodput: Goodput,
    opened: contextlib.ExitStack,
) -> Result:
    timeout = config.distributed.timeout_seconds
    note = run_on_process_0(lambda: opened.enter_context(only_run_in(config.run.folder)), timeout)
    if note is not None:
        display.say(note)
    copies = BucketCopy(config)
    if config.run.bucket is None:
        _seen_by_all(f"lock file of {config.run.folder}", lambda: holder(config.run.folder), config)
    else:
        display.say(f"note: no other host can see that this run writes into {config.run.bucket}")
        run_on_process_0(copies.fetch, timeout)
    epochs, config = config.run.epochs, with_steps(config)
    if epochs is not None:
        check_same_data({f"steps in {epochs:g} epochs": config.run.steps}, "data")
    if config.checkpoint.skip_damaged and config.checkpoint.resume is not False:
        skip = functools.partial(run_folder.skip_damaged, config, display.say)
        run_on_process_0(skip, config.run.step_timeout_seconds)
    resume_from = agreed_resume_step(config)
    config = _with_bos(config, resume_from, display)
    resume_from = newest_local_step(config, resume_from, opened) or resume_from
    tools = make_tools(config)
    if resume_from is not None and given.state is not None:
        raise UserError(
            f"fit(state=...) begins a run, but {config.run.folder} has a checkpoint of step "
            f"{resume_from}: use another run.name, or checkpoint.resume = false"
        )
    if resume_from is not None and resume_from >= config.run.steps:
        display.say(
            *already_complete(config, resume_from, _changed_fields(config, tools, resume_from))
        )
        if config.checkpoint.export_hf:
            for place in tools.export_checkpoint(resume_from):
                display.say(f"  wrote      {place}")
        copies.push()
        return Result([], None)
    use_compile_cache(config)
    if config.guard.verify:
        display.say("verifying the devices and their links ...")
        limit = config.run.step_timeout_seconds
        with contextlib.closing(HangWatchdog(limit, display.say, None)) as watchdog:
            tools.verify(watchdog)
    run_on_process_0(lambda: _prepare_folder(config, resume_from, display), timeout)
    opened.callback(copies.push)
    with contextlib.ExitStack() as parts:
        trainer = Trainer(
            config, tools, given, resume_from, display, signals, peers, goodput, copies, parts
        )
        try:
            result = trainer.train()
        except KeyboardInterrupt as error:
            raise UserError(trainer.with_way_to_resume("interrupted")) from error
        except JaxRuntimeError as error:
            check_pool_error(error, trainer.way_to_resume())
            raise
    if config.metrics.report and config.metrics.jsonl and distributed.is_first():
        result = dataclasses.replace(result, places=[*result.places, tools.page()])
    history = trainer.history
    display.say(*summary(config, history, result.places))
    if not history.finite:
        raise UserError(
            f"all {history.count} steps of {config.run.name} had a non-finite loss or gradient, so "
            "nothing was trained; try a lower optimizer.lr, a longer optimizer.warmup_steps or "
            "other data"
        )
    return result


def _with_given(config: Config, given: Given) -> Config:
    """Checks the arguments of `fit`, and says in the configuration where the data is from."""
    for callback in given.callbacks:
        if not isinstance(callback, Callback):
            kind = type(callback).__name__
            raise UserError(
                f"fit(callbacks=...) has an object of type {kind}: it must be a mtraining_jax."
                "Callback"
            )
    if given.optimizer is not None and config.optimizer.offload:
        raise UserError("optimizer.offload is not possible with fit(optimizer=...)")
    if given.data is None:
        return config
    if config.run.epochs is not None:
        raise UserError(
            f"run.epochs = {config.run.epochs:g} needs the length of the data, which fit(data=...) "
            "does not have: set run.steps"
        )
    data = dataclasses.replace(
        config.data,
        source_options=GivenSource(),
        mode="concat",
        mask_documents=config.data.has_documents,
    )
    config = dataclasses.replace(config, data=data)
    validate(config)
    return config


def agreed_resume_step(config: Config) -> int | None:
    """Returns the resume step of process 0; the others must find the same checkpoint."""
    name = f"newest checkpoint in {run_folder.checkpoint_folder(config)}"
    return _seen_by_all(name, lambda: run_folder.resume_step(config), config)


def _with_bos(config: Config, step: int | None, display: Display) -> Config:
    """Keeps `data.bos` of a checkpoint or of token files; prints a note on older checkpoints."""
    if step is None:
        return with_bos(config)
    saved = read_record(run_folder.checkpoint_folder(config), step)["config"]
    resumed, data = with_bos(config, saved), config.data
    if resumed.data.bos is False and data.bos is None and not data.source_options.holds_ids:
        usual = make_tokenizer(data.tokenizer, data.eos)
        if usual.bos:
            display.say(
                "note: this run was trained on documents without a beginning-of-sequence token and "
                f"resumes so; a new run has them begin {usual.beginning} (data.bos)"
            )
    return resumed


def _seen_by_all[T](name: str, look: Callable[[], T], config: Config) -> T:
    """Returns what process 0 sees in the output folder, and checks that the others see it too."""
    timeout = config.distributed.timeout_seconds
    value = run_on_process_0(look, timeout)
    seen = run_folder.wait_for(value, look, timeout / 2)
    assert_same_on_all_processes({f"{name} ({_SHARED})": seen}, timeout)
    return value


def _changed_fields(config: Config, tools: Tools, step: int) -> list[str]:
    """Fields that differ from those of a complete run's checkpoint; if any, checks all options."""
    folder = run_folder.checkpoint_folder(config)
    try:
        record = read_record(folder, step)
        changed = changed_fields(folder / str(step), record["config"], config)
    except UserError:
        return []
    if changed:
        mesh = build_mesh(config)
        check_same_model(folder / str(step), record["config"], config)
        builder = StateBuilder(config, mesh)
        build_pattern(config)
        banner(config, builder.count_parameters(), mesh, "")  # checks the backend
        batches = DeviceBatches(config, mesh, build_layout(config), balance=tools.balance)
        with contextlib.closing(batches):
            batches.loader.set_state(record["loader"])
        if config.eval.interval:
            Evaluator(config, builder, mesh).close()
    return changed


def _prepare_folder(config: Config, resume_from: int | None, display: Display) -> None:
    aside = run_folder.move_aside(config) if resume_from is None else None
    if aside is not None:
        display.say(f"starting from scratch; the previous run of this name is now in {aside}")
    run_folder.record_start(config, resume_from)


def use_compile_cache(config: Config) -> None:
    """Turns on JAX's persistent compilation cache; on GPUs it also keeps autotuning results."""
    folder = config.run.compile_cache_dir
    if folder == "auto":
        # Programs compiled for one kind of CPU may not run on others that share the folder.
        on_gpu = jax.default_backend() == "gpu"
        folder = str(config.run.local_output_dir / "compiled") if on_gpu else "never"
    if folder == "never":
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"run.compile_cache_dir = {folder} is not writable ({error.strerror}); set it to a "
            'writable folder, or to "never" to turn the cache off'
        ) from error
    jax.config.update("jax_compilation_cache_dir", folder)
    # By default JAX skips programs that compile in less than a second, dozens at each start.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # JAX decides at the first compilation whether there is a cache, so reset that decision.
    compilation_cache.reset_cache()
