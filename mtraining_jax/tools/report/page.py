"""Writes one self-contained HTML page about one or several runs."""

import datetime
import html
import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from string import Template

import numpy as np

from mtraining_jax.data.files import errors_as
from mtraining_jax.reporting import PAGE
from mtraining_jax.tools.report.about import about, differences
from mtraining_jax.tools.report.charts import (
    COLORS,
    STYLE,
    Chart,
    figure_of,
    heat_map,
    key,
    line_chart,
    picture,
)
from mtraining_jax.tools.report.runs import Run, read_run
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.version import VERSION

_TEMPLATE = Path(__file__).with_name("template.html")
_WARM_UP = 2  # steps without statistics of speed, as in the summary of a run
_MAX_ALARMS = 10
# fmt: off
_LOSS = (
    Chart("Loss", "nats", {
        "loss": "training", "eval_loss": "validation", "eval_loss_dense": "validation, dense"}),
    Chart("Validation loss by position", "nats, last evaluation", {
        "eval_loss_by_position": "as trained", "eval_loss_dense_by_position": "dense attention"}),
    Chart("Gradient norm", "before clipping", {"grad_norm": ""}),
    Chart("Learning rate", "", {"lr": ""}),
)
_DENSITY = (
    Chart("Density", "% of causal pairs computed", {"density": ""}),
    Chart("Recall", "% of attention mass on computed pairs", {
        "recall": "mean", "recall_worst": "worst head"}),
)
_AUDITS = (
    Chart("Gradient cosine", "with dense attention", {
        "local_gradient_cosine": "queries, mean", "local_gradient_cosine_worst": "worst head"}),
    Chart("Output error", "% of the norm of the exact output", {
        "output_error": "mean", "output_error_worst": "worst head"}),
    Chart("Index gap and starved mass", "fractions of attention mass", {
        "index_gap": "index gap", "starved_mass": "mass on starved keys"}),
)
_SPEED = (
    Chart("Speed", "tokens/s", {"tokens_per_second": ""}, _WARM_UP + 1),
    Chart("Time of a step", "s", {"step_seconds": ""}, _WARM_UP + 1),
    Chart("Model FLOP utilization", "%", {"mfu": ""}, _WARM_UP + 1),
    Chart("Imbalance of replicas", "slowest over mean, modeled", {
        "attention_imbalance": "attention", "step_imbalance": "step"}),
)
_MEMORY = (
    Chart("Memory of the fullest device", "GiB", {
        "memory_bytes_peak": "peak", "memory_bytes_in_use": "in use"}),
)
_MAPS = {"density_per_layer": "Density by layer", "recall_per_head": "Recall by head"}
# Figures of a run: label, metric, statistic and format.
_FACTS = (
    ("steps", "step", "last", "{:,.0f}"),
    ("tokens", "tokens", "last", "{:,.0f}"),
    ("first loss", "loss", "first", "{:.3f}"),
    ("last loss, of 10 steps", "loss", "end", "{:.3f}"),
    ("first validation loss", "eval_loss", "first", "{:.4f}"),
    ("validation loss", "eval_loss", "last", "{:.4f}"),
    ("with dense attention", "eval_loss_dense", "last", "{:.4f}"),
    ("density", "density", "mean", "{:.1%}"),
    ("recall, last audit", "recall", "last", "{:.1%}"),
    ("median step", "step_seconds", "median", "{:.3g} s"),
    ("median speed", "tokens_per_second", "median", "{:,.0f} tokens/s"),
    ("MFU", "mfu", "median", "{:.1%}"),
    ("peak memory", "memory_bytes_peak", "max", "{:.1f} GiB"),
    ("time in steps, with restarts", "time_share/steps", "last", "{:.1%}"),
    ("skipped steps", "skipped_steps", "last", "{:.0f}"),
)
_STATISTICS = {
    "first": lambda x: x[0], "last": lambda x: x[-1], "end": lambda x: x[-10:].mean(),
    "max": np.max, "mean": np.mean,
    "median": lambda x: np.median(x[_WARM_UP:] if len(x) > _WARM_UP else x),
}
# fmt: on


def write_page(folders: Sequence[Path], out: Path) -> None:
    """Writes a page about runs, which needs nothing but its one file.

    Args:
        folders: Run folders with a metrics.jsonl.
        out: The HTML file, replaced if it exists.

    Raises:
        UserError: A folder has no metrics, the file cannot be written, or matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("it needs matplotlib: uv run --extra plot, or pip install matplotlib")
    import matplotlib

    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    runs = [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]
    # Of odd values, such as gradients of 0 on a logarithmic scale.
    with matplotlib.rc_context(STYLE), warnings.catch_warnings(action="ignore"):
        body = _body(runs)
    page = Template(_TEMPLATE.read_text(encoding="utf-8"))
    text = page.substitute(title=html.escape(", ".join(names)), body=body, version=VERSION)
    with errors_as(UserError, f"{out} cannot be written", OSError):
        out.write_text(text, encoding="utf-8")


def page_of_finished_run(folder: Path) -> str:
    """Writes the page of a run into its folder; returns its path, or why there is none."""
    try:
        write_page([folder], folder / PAGE)
    except Exception as error:  # the run has its results already
        return f"no {PAGE}: {error}"
    return str(folder / PAGE)


def _body(runs: Sequence[Run]) -> str:
    def of(text: str, run: Run) -> str:
        return text if len(runs) == 1 else f"{text}: {run.name}".removeprefix(": ")

    def charts(group: Sequence[Chart]) -> list[str]:
        return [line_chart(chart, runs) for chart in group]

    maps = [heat_map(run, name, of(text, run)) for name, text in _MAPS.items() for run in runs]
    masks = []
    for run in runs:
        paths = sorted(run.folder.glob("masks/step_*.png"))
        for path in dict.fromkeys((*paths[:1], *paths[-1:])):
            step = path.stem.removeprefix("step_").lstrip("0")
            masks.append(picture(path, of(f"Masks of audited heads in step {step}", run)))
    no_memory = "<p>Not recorded: JAX reports the memory of GPUs, not of CPUs.</p>"
    sections = {
        "": [_facts(run, of("", run), COLORS[i % len(COLORS)]) for i, run in enumerate(runs)],
        "Loss": charts(_LOSS),
        "Density and recall": charts(_DENSITY) + maps,
        "Audits": [*charts(_AUDITS), *masks, *map(_alarms, runs)],
        "Speed": [*charts(_SPEED), _time(runs)],
        "Memory": list(filter(None, charts(_MEMORY))) or [no_memory],
        "Configuration and samples": [
            _differences(runs),
            *(_text(run, *x) for run in runs for x in run.texts().items()),
        ],
    }
    return "\n".join(
        f"<section><h2>{title}</h2><div>{''.join(parts)}</div></section>"
        for title, parts in sections.items()
        if any(parts)
    ).replace("<h2></h2>", "")


def _card(title: str, body: str, style: str = "") -> str:
    heading = f"<h3>{html.escape(title)}</h3>" if title else ""
    return f'<div class="card" style="{style}">{heading}{body}</div>'


def _facts(run: Run, title: str, color: str) -> str:
    rows = about(run.folder)
    command = rows.pop("command", None)
    if len(wall := run.curve("wall_time")[1]):
        rows["duration"] = str(datetime.timedelta(seconds=round(wall[-1])))
    for label, name, statistic, form in _FACTS:
        if len(values := run.curve(name)[1]):
            rows[label] = form.format(_STATISTICS[statistic](values))
    if note := run.records[-1].get("sparsity"):
        rows["density"] = f"{rows.get('density', '')} ({note})"
    tiles = (
        f"<div><dt>{name}</dt><dd>{html.escape(text)}</dd></div>" for name, text in rows.items()
    )
    body = f"<dl>{''.join(tiles)}</dl>"
    if command is not None:
        body += f"<pre>{html.escape(command)}</pre>"
    return _card(title, body, f"border-top: 4px solid {color}")


def _alarms(run: Run) -> str:
    if not any("alarms" in record for record in run.records):
        return ""
    found = [(x["step"], str(text)) for x in run.records for text in x.get("alarms") or ()]
    items = (f"<li>step {step:,}: {html.escape(text)}</li>" for step, text in found[-_MAX_ALARMS:])
    which = f", the last {_MAX_ALARMS}" if len(found) > _MAX_ALARMS else ""
    body = f"<ul>{''.join(items)}</ul>" if found else "<p>No head was beyond a limit twice.</p>"
    return _card(f"Alarms of {run.name}: {len(found)}{which}", body)


def _differences(runs: Sequence[Run]) -> str:
    rows = differences([run.folder for run in runs])
    if not rows:
        return ""
    lines = [("", *(run.name for run in runs)), *((name, *row) for name, row in rows.items())]
    cells = ("".join(f"<td>{html.escape(text)}</td>" for text in line) for line in lines)
    body = "".join(f"<tr>{line}</tr>" for line in cells)
    return _card("Differences of the configurations", f"<table>{body}</table>", "overflow-x: auto")


def _time(runs: Sequence[Run]) -> str:
    """Bars of the recorded seconds of each run."""
    bars, kinds = [], list(dict.fromkeys(kind for run in runs for kind in run.seconds()))
    colors = {kind: COLORS[i % len(COLORS)] for i, kind in enumerate(kinds)}
    for run in runs:
        seconds = run.seconds()
        items, total = seconds.items(), sum(seconds.values()) or 1
        parts = (f'<i style="flex:{x:.3f};background:{colors[kind]}"></i>' for kind, x in items)
        text = (f"{x:,.1f} s {kind} ({x / total:.0%})" for kind, x in items)
        bars.append(f'<div class="bar">{"".join(parts)}</div>')
        bars.append(f"<p>{html.escape(f'{run.name}: {", ".join(text)}')}</p>")
    legend = [key(color, kind) for kind, color in colors.items()]
    unit = "without the start and the last checkpoint"
    return figure_of("Where time went", unit, "".join(bars), legend)


def _text(run: Run, name: str, text: str) -> str:
    title = html.escape(f"{run.name}/{name}")
    body = f"<summary>{title}</summary><pre>{html.escape(text)}</pre>"
    return f'<details class="card">{body}</details>'
