"""Builds the tables of an evaluation, for the terminal and for Markdown."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import rich.box
import rich.table

from mtraining_jax.evaluation.report.cells import Lines, Mean
from mtraining_jax.evaluation.tasks import GROUPS
from mtraining_jax.models.position_buckets import bucket_names
from mtraining_jax.utils.text import counted

_EMPTY = "–"
# Groups of tasks with a mean of their own.
_BENCHMARKS = {"ruler": "RULER", "infinitebench": "InfiniteBench", "longbench": "LongBench"}


@dataclass(frozen=True)
class TextTable:
    """A table of text, with a note about its numbers."""

    title: str
    note: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int  # number of leading columns that hold names, not numbers

    def markdown(self) -> str:
        aligned = ["---" if i < self.left else "--:" for i in range(len(self.header))]
        lines = (self.header, aligned, *self.rows)
        body = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return f"## {self.title}\n\n{self.note}\n\n{body}\n"

    def for_terminal(self) -> rich.table.Table:
        table = rich.table.Table(
            title=self.title,
            caption=self.note,
            box=rich.box.SIMPLE_HEAD,
            title_justify="left",
            caption_justify="left",
        )
        for i, name in enumerate(self.header):
            table.add_column(name, justify="left" if i < self.left else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table


def tables(lines: Lines, names: Mapping[str, str]) -> Iterator[TextTable]:
    """Yields all tables for the lines; `names` are those of the models by label."""
    if lines.scored:
        yield scores(lines, names)
        if len(lines.models) > 1 and len(lines.attentions) > 1:
            yield trained_and_inferred(lines, names)
        yield times(lines, names)
    for length in lines.document_lengths:
        yield losses(lines, names, length)


def scores(lines: Lines, names: Mapping[str, str]) -> TextTable:
    """One row per task, model and attention, one column per length."""
    rows: list[tuple[str, ...]] = []

    def row(task: str, model: str, what: str, means: list[Mean | None], signed: bool) -> None:
        cells = tuple(percent(mean, signed) for mean in means)
        if any(mean is not None for mean in means):
            rows.append((task, model, what, *cells))

    def difference(task: str, first: tuple[str, str], second: tuple[str, str]) -> list[Mean | None]:
        return [lines.difference(first, second, task, length) for length in lines.lengths]

    for task in lines.tasks:
        for model in lines.models:
            for attention in lines.attentions:
                means = [lines.score(model, attention, task, n) for n in lines.lengths]
                row(task, names[model], attention, means, signed=False)
            means = difference(task, (model, "sparse"), (model, "dense"))
            row(task, names[model], "sparse - dense", means, signed=True)
        for first, second in itertools.pairwise(lines.models):
            for attention in lines.attentions:
                means = difference(task, (second, attention), (first, attention))
                row(task, f"{names[second]} - {names[first]}", attention, means, signed=True)
    for name, tasks in means_over(lines.tasks):
        for model in lines.models:
            for attention in lines.attentions:
                means = [lines.mean_of_tasks(model, attention, n, tasks) for n in lines.lengths]
                row(name, names[model], attention, means, signed=False)
    return TextTable(
        "Scores",
        "Percent, with standard error and number of samples (of tasks, for a mean). There is no "
        "error if all samples have the same score. Differences are means over the same prompts.",
        ("task", "model", "attention", *map(str, lines.lengths)),
        tuple(rows),
        left=3,
    )


def means_over(tasks: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields named groups of tasks to average: each benchmark, and all tasks together."""
    in_one = False
    for group, title in _BENCHMARKS.items():
        members = [task for task in tasks if task in GROUPS[group]]
        if len(members) > 1:
            yield f"mean of {len(members)} of {title}'s {len(GROUPS[group])}", members
            in_one = len(members) == len(tasks)
    if len(tasks) > 1 and not in_one:
        yield f"mean of {len(tasks)} tasks", list(tasks)


def trained_and_inferred(lines: Lines, names: Mapping[str, str]) -> TextTable:
    """Two models with both kinds of attention, to compare training and inference."""
    rows = []
    name = next((name for name, tasks in means_over(lines.tasks) if tasks == lines.tasks), None)
    for length in lines.lengths:
        for model in lines.models:
            means = [
                lines.mean_of_tasks(model, attention, length, lines.tasks)
                for attention in lines.attentions
            ]
            cells = (percent(mean).partition(" (")[0] for mean in means)
            rows.append((str(length), names[model], *cells))
    return TextTable(
        "Training and inference",
        f"Percent, {name or lines.tasks[0]}. Rows: trained model. Columns: attention of the prompt "
        "at inference.",
        ("length", "model", *(f"{attention} inference" for attention in lines.attentions)),
        tuple(rows),
        left=2,
    )


def times(lines: Lines, names: Mapping[str, str]) -> TextTable:
    """Seconds per sample and density, by length."""
    rows = []
    for length in lines.lengths:
        for model in lines.models:
            for attention in lines.attentions:
                seconds = lines.seconds(model, attention, length)
                if seconds:
                    densities = lines.densities(model, attention, length)
                    density = f"{float(np.mean(densities)):.1%}" if densities else _EMPTY
                    median = f"{float(np.median(seconds)):.3g}"
                    count = str(len(seconds))
                    rows.append((str(length), names[model], attention, median, density, count))
    return TextTable(
        "Times and density",
        "Median seconds per sample on this machine, including the answer but not the making of the "
        "prompt. The first sample of a length compiles. Density is computed over causal pairs in "
        "the prompt's forward pass, mean over layers and samples.",
        ("length", "model", "attention", "seconds", "density", "samples"),
        tuple(rows),
        left=3,
    )


def losses(lines: Lines, names: Mapping[str, str], length: int) -> TextTable:
    """Loss by position: one row per bucket, one column per model and attention."""
    columns: dict[str, list[str]] = {}
    for model in lines.models:
        for attention in lines.attentions:
            found = lines.losses_of_documents(model, attention, length)
            if found:
                mean = np.mean(list(found.values()), axis=0)
                columns[f"{names[model]}, {attention}"] = [f"{x:.3f}" for x in mean]
        pair = [lines.losses_of_documents(model, name, length) for name in ("sparse", "dense")]
        both = pair[0].keys() & pair[1].keys()
        if both:
            of = np.array([np.subtract(pair[0][n], pair[1][n]) for n in sorted(both)])
            name = f"{names[model]}, sparse - dense"
            columns[name] = [_signed(Mean.of(values)) for values in of.T]
    count = max(
        len(lines.losses_of_documents(model, attention, length))
        for model in lines.models
        for attention in lines.attentions
    )
    buckets = len(next(iter(columns.values()))) - 1
    first = [*(f"from {name}" for name in bucket_names(buckets)), "last 64"]
    return TextTable(
        f"Loss by position, {length} tokens",
        f"Nats, mean over {counted(count, 'document')}. Each row covers the tokens from its "
        "position to that of the next row, predicted from that much context. The last row covers "
        "the last 64 tokens of documents, from which sparse attention selects its index.",
        ("tokens", *columns),
        tuple(zip(first, *columns.values(), strict=True)),
        left=1,
    )


def settings_text(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields the settings of a folder as items of a Markdown list."""
    for label, about in settings.get("models", {}).items():
        facts = ", ".join(f"{name} {value}" for name, value in about.items() if name != "name")
        yield f"- {label}: {about['name']}" + (f" ({facts})" if facts else "")
    for name, value in settings.items():
        if name == "tasks":
            value = ", ".join(_task_text(task, options) for task, options in value.items())
        if name != "models":
            yield f"- {name}: {_plain(value)}"


def _task_text(task: str, options: Mapping[str, Any]) -> str:
    given = " ".join(f"{name}={_plain(value)}" for name, value in options.items() if value)
    return f"{task} ({given})" if given else task


def _plain(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def percent(mean: Mean | None, signed: bool = False) -> str:
    """`95.0 ± 2.2 (100)`."""
    if mean is None:
        return _EMPTY
    value = f"{100 * mean.value:+.1f}" if signed else f"{100 * mean.value:.1f}"
    error = f" ± {100 * mean.error:.1f}" if mean.error > 0 else ""
    return f"{value}{error} ({mean.count})"


def _signed(mean: Mean) -> str:
    return f"{mean.value:+.3f}" + (f" ± {mean.error:.3f}" if mean.error > 0 else "")
