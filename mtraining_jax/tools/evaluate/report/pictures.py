"""Draws the pictures of an evaluation with matplotlib (extra `plot`)."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtraining_jax.models.label_scores import bucket_names
from mtraining_jax.tools.evaluate.report.cells import Lines, Mean

try:  # not pyplot, which keeps every figure and may need a display
    from matplotlib.figure import Figure
except ImportError:
    Figure = None


class _Panel(NamedTuple):
    """A grid of scores from 0 to 1; a cell without a score is NaN."""

    title: str
    rows: Sequence[object]
    columns: Sequence[object]
    grid: np.ndarray


def draw_all(lines: Lines, folder: Path, caption: str) -> list[Path]:
    """Draws all pictures with a caption; returns the files. ImportError without matplotlib."""
    if Figure is None:
        raise ImportError("matplotlib is not installed")
    written = []
    for name, figure in _figures(lines):
        figure.text(0.01, -0.03, caption, fontsize=7, color="0.35")
        path = folder / name.replace("/", "-")
        figure.savefig(path, dpi=150, bbox_inches="tight")
        written.append(path)
    return written


def _figures(lines: Lines) -> Iterator[tuple[str, Any]]:
    tasks, attentions = lines.tasks, lines.attentions
    for task in tasks:
        labels = "length, tokens", "depth of the needle", f"score of {task}"
        if panels := list(_panels_by_depth(lines, task)):
            yield f"depths-{task}.png", _grids(panels, len(attentions), labels)
    if tasks:
        panels = []
        for run in lines.runs:
            means = {task: [lines.score(run, task, n) for n in lines.lengths] for task in tasks}
            panels.append(_panel("\n".join(run), means, lines.lengths))
        labels = "length, tokens", "", "mean score"
        yield "scores.png", _grids(panels, len(attentions), labels)
        if len(lines.models) > 1 and len(attentions) > 1:
            panels = []
            for n in lines.lengths:
                means = {
                    m: [lines.mean_of_tasks((m, a), tasks, n) for a in attentions]
                    for m in lines.models
                }
                panels.append(_panel(f"{n} tokens", means, attentions))
            labels = "attention at inference", "trained model", "mean score"
            yield "trained-inferred.png", _grids(panels, 4, labels)
    for length in lines.document_lengths:
        yield f"loss-{length}.png", _loss(lines, length)


def _panel(
    title: str, means: Mapping[str, Sequence[Mean | None]], columns: Sequence[object]
) -> _Panel:
    grid = [[np.nan if mean is None else mean.value for mean in row] for row in means.values()]
    return _Panel(title, list(means), columns, np.array(grid))


def _panels_by_depth(lines: Lines, task: str) -> Iterator[_Panel]:
    own = [line for line in lines.scored if line["task"] == task]
    depths = sorted({line["depth"] for line in own if line["depth"] is not None})
    lengths = sorted({line["length"] for line in own})
    for run in lines.runs if depths else ():
        grid, most = np.full((len(depths), len(lengths)), np.nan), 0
        for (i, depth), (j, n) in itertools.product(enumerate(depths), enumerate(lengths)):
            cell = lines.cell(run, task, n).values()
            scores = [line["score"] for line in cell if line["depth"] == depth]
            if scores:
                grid[i, j], most = np.mean(scores), max(most, len(scores))
        if most:
            title = f"{run[0]}\n{run[1]}, up to {most} samples a cell"
            yield _Panel(title, [f"{depth:.0%}" for depth in depths], lengths, grid)


def _figure(width: float, height: float, panels: int, across: int) -> tuple[Any, list[Any]]:
    """Returns a figure and its axes; sizes are those of one panel in inches."""
    assert Figure is not None  # see `draw_all`
    down = math.ceil(panels / across)
    figure = Figure(figsize=(width * across, height * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).ravel().tolist()
    for spare in axes[panels:]:
        spare.set_visible(False)
    return figure, axes[:panels]


def _grids(panels: Sequence[_Panel], across: int, labels: tuple[str, str, str]) -> Any:
    """Draws panels on one scale; `labels` are those of columns, rows and values."""
    size = 2.0 + 0.75 * len(panels[0].columns), 1.2 + 0.3 * len(panels[0].rows)
    figure, axes = _figure(*size, len(panels), min(across, len(panels)))
    for ax, panel in zip(axes, panels, strict=True):
        image = ax.imshow(panel.grid, aspect="auto", cmap="viridis", vmin=0.0, vmax=1.0)
        ax.set_title(panel.title, fontsize=8)
        ax.set_xticks(range(len(panel.columns)), map(str, panel.columns), fontsize=7)
        ax.set_yticks(range(len(panel.rows)), map(str, panel.rows), fontsize=7)
        ax.set_xlabel(labels[0], fontsize=8)
        ax.set_ylabel(labels[1], fontsize=8)
        for (i, j), value in np.ndenumerate(panel.grid):
            if not np.isnan(value):
                color = "black" if value > 0.6 else "white"
                text = f"{100 * value:.0f}"
                ax.text(j, i, text, ha="center", va="center", fontsize=7, color=color)
    figure.colorbar(image, ax=axes, label=labels[2])
    return figure


def _loss(lines: Lines, length: int) -> Any:
    figure, (ax,) = _figure(6, 3.6, 1, 1)
    for run in lines.runs:
        documents = list(lines.losses(run, length).values())
        if not documents:
            continue
        means = [Mean.of(values) for values in np.array(documents).T[:-1]]
        ax.errorbar(
            range(len(means)),
            [mean.value for mean in means],
            np.nan_to_num([mean.error for mean in means]),
            capsize=2,
            marker="o",
            markersize=3,
            linestyle="-" if run[1] == "dense" else "--",
            label=", ".join(run),
        )
        ax.set_xticks(range(len(means)), bucket_names(len(means)), fontsize=7)
    ax.set_xlabel("tokens of context, from this power of two to the next")
    ax.set_ylabel("loss, nats")
    ax.legend(fontsize=7)
    ax.grid(alpha=0.3)
    return figure
