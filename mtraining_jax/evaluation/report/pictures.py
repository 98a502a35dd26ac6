"""Draws the pictures of an evaluation with matplotlib (extra `plot`)."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mtraining_jax.evaluation.report.cells import Lines, Mean
from mtraining_jax.models.position_buckets import bucket_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# All pictures share one color scale for scores from 0 to 1, so that they can be compared.
_COLORS = {"cmap": "viridis", "vmin": 0.0, "vmax": 1.0}


def draw_all(lines: Lines, names: Mapping[str, str], folder: Path, caption: str) -> list[Path]:
    """Draws all pictures into a folder, with a caption below each, and returns the files.

    `names` are those of the models by label. Raises ImportError if matplotlib is not installed.
    """
    figures: list[tuple[str, Figure]] = [
        *((f"depths-{task}.png", figure) for task, figure in _heat_maps(lines, names))
    ]
    if lines.scored:
        figures.append(("scores.png", _scores(lines, names)))
        if len(lines.models) > 1 and len(lines.attentions) > 1:
            figures.append(("trained-inferred.png", _trained_inferred(lines, names)))
    for length in lines.document_lengths:
        figures.append((f"loss-{length}.png", _loss(lines, names, length)))
    written = []
    for name, figure in figures:
        figure.text(0.01, -0.03, caption, fontsize=7, color="0.35")
        path = folder / name.replace("/", "-")
        figure.savefig(path, dpi=150, bbox_inches="tight")
        written.append(path)
    return written


def _figure(
    width: float, height: float, panels: int, columns: int
) -> tuple["Figure", list["Axes"]]:
    # Not pyplot, which keeps every figure and may need a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for spare in axes[panels:]:
        spare.set_visible(False)
    return figure, axes[:panels]


def _heat_maps(lines: Lines, names: Mapping[str, str]) -> Iterator[tuple[str, "Figure"]]:
    """For tasks with a depth: length by depth, one panel per model and attention."""
    for task in lines.tasks:
        own = [line for line in lines.scored if line["task"] == task]
        depths = sorted({line["depth"] for line in own if line["depth"] is not None})
        if not depths:
            continue
        lengths = sorted({line["length"] for line in own})
        panels = [
            (model, attention)
            for model in lines.models
            for attention in lines.attentions
            if any((line["model"], line["attention"]) == (model, attention) for line in own)
        ]
        size = 1.6 + 0.75 * len(lengths), 1.2 + 0.3 * len(depths)
        figure, axes = _figure(*size, len(panels), len(lines.attentions))
        for ax, (model, attention) in zip(axes, panels, strict=True):
            grid, most = np.full((len(depths), len(lengths)), np.nan), 0
            for i, depth in enumerate(depths):
                for j, length in enumerate(lengths):
                    found = [
                        line["score"]
                        for line in lines.cell(model, attention, task, length).values()
                        if line["depth"] == depth
                    ]
                    if found:
                        grid[i, j], most = np.mean(found), max(most, len(found))
            image = ax.imshow(grid, aspect="auto", **_COLORS)
            ax.set_title(f"{names[model]}\n{attention}, up to {most} samples a cell", fontsize=8)
            _grid_labels(ax, grid, [str(n) for n in lengths], [f"{d:.0%}" for d in depths])
            ax.set_xlabel("length, tokens", fontsize=8)
            ax.set_ylabel("depth of the needle", fontsize=8)
        figure.colorbar(image, ax=axes, label=f"score of {task}")
        yield task, figure


def _scores(lines: Lines, names: Mapping[str, str]) -> "Figure":
    """Tasks by length, one panel per model and attention."""
    panels = [(model, attention) for model in lines.models for attention in lines.attentions]
    size = 2.2 + 0.75 * len(lines.lengths), 1.2 + 0.3 * len(lines.tasks)
    figure, axes = _figure(*size, len(panels), len(lines.attentions))
    for ax, (model, attention) in zip(axes, panels, strict=True):
        grid = np.full((len(lines.tasks), len(lines.lengths)), np.nan)
        for i, task in enumerate(lines.tasks):
            for j, length in enumerate(lines.lengths):
                mean = lines.score(model, attention, task, length)
                if mean is not None:
                    grid[i, j] = mean.value
        image = ax.imshow(grid, aspect="auto", **_COLORS)
        ax.set_title(f"{names[model]}\n{attention}", fontsize=8)
        _grid_labels(ax, grid, [str(n) for n in lines.lengths], lines.tasks)
        ax.set_xlabel("length, tokens", fontsize=8)
    figure.colorbar(image, ax=axes, label="mean score")
    return figure


def _trained_inferred(lines: Lines, names: Mapping[str, str]) -> "Figure":
    """Models by attention, one panel per length: mean over tasks."""
    figure, axes = _figure(3.2, 2.2, len(lines.lengths), min(4, len(lines.lengths)))
    for ax, length in zip(axes, lines.lengths, strict=True):
        grid = np.full((len(lines.models), len(lines.attentions)), np.nan)
        for i, model in enumerate(lines.models):
            for j, attention in enumerate(lines.attentions):
                mean = lines.mean_of_tasks(model, attention, length, lines.tasks)
                if mean is not None:
                    grid[i, j] = mean.value
        ax.imshow(grid, aspect="auto", **_COLORS)
        ax.set_title(f"{length} tokens", fontsize=8)
        _grid_labels(ax, grid, lines.attentions, [names[model] for model in lines.models])
        ax.set_xlabel("attention at inference", fontsize=8)
        ax.set_ylabel("trained model", fontsize=8)
    return figure


def _loss(lines: Lines, names: Mapping[str, str], length: int) -> "Figure":
    """Loss over position, one line per model and attention."""
    figure, (ax,) = _figure(6, 3.6, 1, 1)
    for model in lines.models:
        for attention in lines.attentions:
            found = list(lines.losses_of_documents(model, attention, length).values())
            if not found:
                continue
            means = [Mean.of(values) for values in np.array(found).T[:-1]]
            values = [mean.value for mean in means]
            errors = np.nan_to_num([mean.error for mean in means])
            ax.errorbar(
                range(len(means)),
                values,
                errors,
                capsize=2,
                marker="o",
                markersize=3,
                linestyle="-" if attention == "dense" else "--",
                label=f"{names[model]}, {attention}",
            )
            ax.set_xticks(range(len(means)), bucket_names(len(means)), fontsize=7)
    ax.set_xlabel("tokens of context, from this power of two to the next")
    ax.set_ylabel("loss, nats")
    ax.legend(fontsize=7)
    ax.grid(alpha=0.3)
    return figure


def _grid_labels(ax: "Axes", grid: np.ndarray, columns: list[str], rows: list[str]) -> None:
    ax.set_xticks(range(len(columns)), columns, fontsize=7)
    ax.set_yticks(range(len(rows)), rows, fontsize=7)
    for (i, j), value in np.ndenumerate(grid):
        if not np.isnan(value):
            color = "black" if value > 0.6 else "white"
            text = f"{100 * value:.0f}"
            ax.text(j, i, text, ha="center", va="center", fontsize=7, color=color)
