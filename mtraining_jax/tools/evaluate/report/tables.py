"""Builds the tables of an evaluation, for the terminal and for Markdown."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import rich.box
import rich.table

from mtraining_jax.models.label_scores import bucket_names
from mtraining_jax.tools.evaluate.report.cells import Lines, Mean, Run
from mtraining_jax.tools.evaluate.tasks import GROUPS
from mtraining_jax.utils.text import counted

_EMPTY = "–"
# Groups of tasks with a mean of their own.
_BENCHMARKS = {"ruler": "RULER", "infinitebench": "InfiniteBench", "longbench": "LongBench"}


class TextTable(NamedTuple):
    """A table of text, with a note about its numbers; the first `left` columns hold names."""

    title: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int

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


def tables(lines: Lines) -> Iterator[TextTable]:
    """Yields all tables for the lines."""
    if lines.scored:
        yield _scores(lines)
        if len(lines.models) > 1 and len(lines.attentions) > 1:
            yield _trained_and_inferred(lines)
    yield _times(lines)
    for length in lines.document_lengths:
        yield _losses(lines, length)


def _scores(lines: Lines) -> TextTable:
    rows = []

    def add(*labels: str, means: Iterable[Mean | None], signed: bool = False) -> None:
        means = list(means)
        if any(means):
            rows.append((*labels, *(_percent(mean, signed) for mean in means)))

    def add_difference(task: str, first: Run, second: Run, *labels: str) -> None:
        means = (lines.difference(first, second, task, n) for n in lines.lengths)
        add(task, *labels, means=means, signed=True)

    for task in lines.tasks:
        for model in lines.models:
            for attention in lines.attentions:
                means = (lines.score((model, attention), task, n) for n in lines.lengths)
                add(task, model, attention, means=means)
            add_difference(task, (model, "sparse"), (model, "dense"), model, "sparse - dense")
        for first, second in itertools.pairwise(lines.models):
            for x in lines.attentions:
                add_difference(task, (second, x), (first, x), f"{second} - {first}", x)
    for name, tasks in _averages(lines.tasks):
        for run in lines.runs:
            add(name, *run, means=(lines.mean_of_tasks(run, tasks, n) for n in lines.lengths))
    return TextTable(
        "Scores",
        "Percent, with standard error and number of samples (of tasks, for a mean). There is no "
        "error if all samples have the same score. Differences are means over the same prompts.",
        ("task", "model", "attention", *map(str, lines.lengths)),
        rows,
        left=3,
    )


def _averages(tasks: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields named groups of tasks to average: each benchmark, and all tasks together."""
    all_in_one = False
    for group, title in _BENCHMARKS.items():
        members = [task for task in tasks if task in GROUPS[group]]
        if len(members) > 1:
            yield f"mean of {len(members)} of {title}'s {len(GROUPS[group])}", members
            all_in_one = len(members) == len(tasks)
    if len(tasks) > 1 and not all_in_one:
        yield f"mean of {len(tasks)} tasks", tasks


def _trained_and_inferred(lines: Lines) -> TextTable:
    rows = []
    for length, model in itertools.product(lines.lengths, lines.models):
        means = (lines.mean_of_tasks((model, a), lines.tasks, length) for a in lines.attentions)
        cells = (_percent(mean).partition(" (")[0] for mean in means)
        rows.append((str(length), model, *cells))
    averages = (name for name, tasks in _averages(lines.tasks) if tasks == lines.tasks)
    return TextTable(
        "Training and inference",
        f"Percent, {next(averages, lines.tasks[0])}. Rows: trained model. Columns: attention of "
        "the prompt at inference.",
        ("length", "model", *(f"{attention} inference" for attention in lines.attentions)),
        rows,
        left=2,
    )


def _times(lines: Lines) -> TextTable:
    rows = []
    lengths = sorted({*lines.lengths, *lines.document_lengths})
    for length, run in itertools.product(lengths, lines.runs):
        if found := lines.asked(run, length):
            median = f"{float(np.median([line['seconds'] for line in found])):.3g}"
            densities = [line["density"] for line in found if line.get("density") is not None]
            density = f"{float(np.mean(densities)):.1%}" if densities else _EMPTY
            rows.append((str(length), *run, median, density, str(len(found))))
    return TextTable(
        "Times and density",
        "Median seconds per sample on this machine, including the answer but not the making of the "
        "prompt. The first sample of a length compiles. Density is computed over causal pairs in "
        "the forward pass over a prompt or document, mean over layers and samples.",
        ("length", "model", "attention", "seconds", "density", "samples"),
        rows,
        left=3,
    )


def _losses(lines: Lines, length: int) -> TextTable:
    columns: dict[str, list[str]] = {}
    documents = {run: lines.losses(run, length) for run in lines.runs}
    for model in lines.models:
        for attention in lines.attentions:
            if found := documents[model, attention]:
                mean = np.mean(list(found.values()), axis=0)
                columns[f"{model}, {attention}"] = [f"{x:.3f}" for x in mean]
        sparse, dense = (documents.get((model, name), {}) for name in ("sparse", "dense"))
        if both := sorted(sparse.keys() & dense.keys()):
            differences = np.array([np.subtract(sparse[n], dense[n]) for n in both])
            means = map(Mean.of, differences.T)
            columns[f"{model}, sparse - dense"] = [_shown(mean, "+.3f") for mean in means]
    buckets = len(next(iter(columns.values()))) - 1
    first = [*(f"from {name}" for name in bucket_names(buckets)), "last 64"]
    count = counted(max(map(len, documents.values())), "document")
    return TextTable(
        f"Loss by position, {length} tokens",
        f"Nats, mean over {count}. Each row covers the tokens from its "
        "position to that of the next row, predicted from that much context. The last row covers "
        "the last 64 tokens of documents, from which vertical-slash selects its index.",
        ("tokens", *columns),
        list(zip(first, *columns.values(), strict=True)),
        left=1,
    )


def settings_text(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields the settings of a folder as items of a Markdown list."""
    for label, about in settings.get("models", {}).items():
        facts = ", ".join(f"{name} {value}" for name, value in about.items() if name != "name")
        yield f"- {label}: {about['name']}" + (f" ({facts})" if facts else "")
    for name, value in settings.items():
        if name == "tasks":
            tasks = []
            for task, options in value.items():
                given = " ".join(f"{option}={x}" for option, x in options.items() if x)
                tasks.append(f"{task} ({given})" if given else task)
            value = ", ".join(tasks)
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        if name != "models":
            yield f"- {name}: {value}"


def _percent(mean: Mean | None, signed: bool = False) -> str:
    """`95.0 ± 2.2 (100)`."""
    if mean is None:
        return _EMPTY
    percent = Mean(100 * mean.value, 100 * mean.error, mean.count)
    return f"{_shown(percent, '+.1f' if signed else '.1f')} ({mean.count})"


def _shown(mean: Mean, form: str) -> str:
    error = f" ± {mean.error:{form.removeprefix('+')}}" if mean.error > 0 else ""
    return f"{mean.value:{form}}{error}"
