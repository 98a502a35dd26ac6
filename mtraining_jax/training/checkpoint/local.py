"""Checkpoints on a disk of each host, more frequent than those in the folder of the run.

Every process writes all arrays of its devices into its own folder, so a step can be resumed if all
processes still have it.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from mtraining_jax.config import Config
from mtraining_jax.training.checkpoint.run_folder import CHECKPOINTS_NAME
from mtraining_jax.training.checkpoint.run_lock import only_run_in
from mtraining_jax.training.checkpoint.store import (
    Checkpoints,
    newest_step,
    read_record,
    read_state,
    saved_steps,
)
from mtraining_jax.training.optimizer import Parameters
from mtraining_jax.training.processes.agreement import collect, run_on_process_0
from mtraining_jax.training.state import TrainState
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.printable import print_message

# While a process writes a step, another may still be writing the one before.
_KEPT = 2


def newest_local_step(
    config: Config, shared: int | None, opened: contextlib.ExitStack
) -> int | None:
    """Returns the newest step that all processes hold, if it is newer than the shared checkpoint.

    All processes call it together. Until `opened` is closed, no other run can use their folders.
    A UserError if another run uses one, or has checkpoints there from which it would resume.
    """
    checkpoint, timeout = config.checkpoint, config.distributed.timeout_seconds
    if checkpoint.local_dir is None:
        return None
    origin, _ = _origin(config)
    problem, own = "", []
    try:
        own = _held(config, origin, opened)
    except UserError as error:
        problem = f"checkpoint.local_dir = {checkpoint.local_dir}: {error}"
    answers = collect([problem, own], timeout)

    def newest() -> int | None:
        for problem in filter(None, (problem for problem, _ in answers)):
            raise UserError(problem)
        if checkpoint.resume is False:
            return None
        common = set.intersection(*({(step, start) for step, start in x} for _, x in answers))
        usable = (step for step, _ in common if (shared or 0) < step < config.run.steps)
        return max(usable, default=None)

    return run_on_process_0(newest, timeout)


def open_local(config: Config, resume_from: int | None) -> Checkpoints:
    """Opens the folder of this process, and deletes all but the checkpoint of `resume_from`."""
    folder = _folder(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.name != str(resume_from):
                shutil.rmtree(path)
    except OSError as error:
        raise UserError(
            f"checkpoint.local_dir = {config.checkpoint.local_dir}: {folder} is not writable "
            f"({error.strerror or error})"
        ) from error
    origin, start = _origin(config)
    more = {"local": origin, "start": start, "run": str(config.run.folder.absolute())}
    return Checkpoints(folder, keep=_KEPT, async_save=config.checkpoint.async_save, local=more)


def read_local_state(
    config: Config, step: int, abstract: TrainState, load_base: Callable[[], Parameters]
) -> tuple[TrainState, dict[str, Any]]:
    """Reads what this process has saved; see `read_state`."""
    try:
        return read_state(_folder(config), step, abstract, config, load_base)
    except UserError as error:
        reason = str(error).partition("; ")[0]
        way = "to resume from the checkpoint in the run folder set checkpoint.local_dir=none"
        raise UserError(f"{reason}; {way}") from error


def _folder(config: Config) -> Path:
    parent = Path(config.checkpoint.local_dir or "").absolute()
    return parent / config.run.name / f"process_{jax.process_index()}"


def _origin(config: Config) -> tuple[dict[str, Any], int]:
    """What a run must share with the one that saved, and the number of its starts."""

    def starts() -> tuple[str, int]:
        path = config.run.folder / "starts.jsonl"
        lines = path.read_bytes().splitlines() if path.is_file() else [b""]
        return hashlib.sha256(lines[0]).hexdigest(), len(lines)

    first, number = run_on_process_0(starts, config.distributed.timeout_seconds)
    parallel = json.loads(json.dumps(config.to_dict()["parallel"]))
    return {"first": first, "processes": jax.process_count(), "parallel": parallel}, number


def _held(
    config: Config, origin: dict[str, Any], opened: contextlib.ExitStack
) -> list[tuple[int, int]]:
    """Steps with complete checkpoints of this run, and the starts that saved them.

    Locks the folder, which must be no link. A UserError if another run needs what it has.
    """
    folder, run, held = _folder(config), config.run.folder.absolute(), []
    parent = Path(config.checkpoint.local_dir or "").absolute()
    way_out = "checkpoint.local_dir or run.name"
    if folder.resolve() != parent.resolve() / folder.relative_to(parent):
        raise UserError(
            f"{folder} leads to {folder.resolve()} by a symbolic link, and what is there would be "
            f"deleted; set another {way_out}"
        )
    note = opened.enter_context(only_run_in(folder, f"run {run}", way_out))
    if note is not None:
        print_message(note)
    for step in saved_steps(folder):
        try:
            record = read_record(folder, step)
        except UserError:
            continue
        if record.get("local") == origin:
            held.append((step, record["start"]))
            continue
        other = Path(record.get("run", run))
        if other != run and other.is_dir() and step > (newest_step(other / CHECKPOINTS_NAME) or 0):
            raise UserError(
                f"{folder} has the checkpoint of step {step} of another run, {other}, which would "
                f"resume from it; set another {way_out}, or delete {folder}"
            )
    return held
