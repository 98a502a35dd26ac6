"""Runs a complete evaluation: loads, checks and evaluates one model after the other."""

import argparse
import dataclasses
import datetime
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from mtraining_jax.patterns.row_pattern import PROMPT_END
from mtraining_jax.tools.evaluate.engine.engine import Engine
from mtraining_jax.tools.evaluate.load import digest_of, digests_of, max_positions
from mtraining_jax.tools.evaluate.progress import Watch
from mtraining_jax.tools.evaluate.report import write_results
from mtraining_jax.tools.evaluate.results import Results
from mtraining_jax.tools.evaluate.runner import Plan, check, check_lengths, evaluate
from mtraining_jax.tools.evaluate.tasks import Task, make_tasks
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.invocation import command_of
from mtraining_jax.utils.version import VERSION


def run(request: argparse.Namespace, console: Console, command: str) -> None:
    """Evaluates all models on all tasks, and appends new lines to the folder of results.

    `request` is that of `cli/evaluate.py`; `command` is the command line, for the report. Raises
    UserError after an interruption, too.
    """
    tasks = make_tasks(request.tasks, request.options)
    optional = {task.name for task in tasks}.difference(request.tasks)  # of groups
    plan = Plan(tasks, request.lengths, request.samples, request.seed, request.generate, optional)
    paths = {label: Path(path).resolve() for label, path in request.models.items()}
    names = {x: path.name for x, path in paths.items()}
    if len(set(names.values())) < len(names):
        names = {x: "/".join(path.parts[-2:]) for x, path in paths.items()}
    # Checked before minutes of loading.
    results = Results(request.output, _settings(request, plan, names))
    for label, path in request.models.items():
        check_lengths(plan.lengths, max_positions(path, request.overrides), names[label])

    def load(label: str) -> tuple[dict[str, Engine], Plan]:
        engines = _load(request, label, console)
        fitting = check(plan, next(iter(engines.values())), names[label])
        for reason in fitting.skipped.values():
            console.print(f"note: skipped: {reason}", markup=False)
        results.check_model(label, digests_of(list(engines.values())[-1].loaded))
        return engines, fitting

    def after_task() -> None:
        write_results(request.output)

    engines = {}
    with Watch(console) as watch:
        for label in request.models:
            engines.clear()  # frees memory
            engines, fitting = load(label)
            with results:
                if label == "model":
                    results.note(_facts(command))
                try:
                    evaluate(fitting, engines, label, results, watch, after_task)
                except KeyboardInterrupt:
                    raise UserError(
                        f"interrupted after {watch.done} of {watch.total} samples; run the same "
                        f"command again to resume, or {command_of('evaluate')} --report "
                        f"{request.output} to see these results"
                    ) from None


def _settings(request: argparse.Namespace, plan: Plan, names: Mapping[str, str]) -> dict[str, Any]:
    """Returns what all lines of a folder must have in common; see `Results`."""
    sparsity = [
        f"{name.removeprefix('sparsity.')}={value}"
        for name, value in sorted(request.overrides.items())
        if name.startswith("sparsity.")
    ]
    tasks = {}
    for task in plan.tasks:
        tasks[task.name] = dataclasses.asdict(task)
        classes = (cls for cls in type(task).__mro__ if issubclass(cls, Task))
        code = dict.fromkeys(Path(inspect.getfile(cls)) for cls in classes)
        tasks[task.name]["digest of code and files"] = digest_of(*code, *task.files)
        del tasks[task.name]["name"]
    return {
        "models": {label: {"name": name} for label, name in names.items()},
        "version": VERSION,
        "seed": plan.seed,
        "generate": plan.generate,
        "answers": request.answers or "as the pattern says",
        "sparsity": " ".join(sparsity) or "as the model says",
        "end of prompts": f"dense_suffix_tokens = {PROMPT_END} unless given",
        "dtype": request.dtype or "as the model says",
        "tokenizer": request.tokenizer or "the model's own",
        "tasks": tasks,
    }


def _facts(command: str) -> dict[str, str]:
    devices = jax.devices()
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "versions": f"jax {jax.__version__}, mtraining-jax {VERSION}",
        "command": command,
    }


def _load(request: argparse.Namespace, label: str, console: Console) -> dict[str, Engine]:
    """Loads the engines of one model by attention kind; they share its parameters."""
    attention = "sparse" if "sparse" in request.attentions else "dense"
    engine = Engine.load(
        request.models[label],
        attention=attention,
        overrides=request.overrides,
        dtype=request.dtype,
        tokenizer=request.tokenizer,
        answers=request.answers,
    )
    console.print(f"{label}: {engine.loaded.source}", markup=False)
    if (note := engine.loaded.note()) is not None:
        console.print(note, markup=False)
    if len(request.attentions) == 2:
        return {"dense": engine.dense(), "sparse": engine}
    return {attention: engine}
