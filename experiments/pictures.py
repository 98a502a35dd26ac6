"""Plots of a tier: loss by position and while training, minus that of dense attention."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.compare import FIRST_BUCKET, Losses, band, paired
from experiments.decision import EQUAL
from experiments.result_lines import Line
from experiments.variants import SPARSE, own_pattern
from mtraining_jax.models.label_scores import bucket_names

# One color for each arm in all plots, from a color-blind safe palette.
_COLORS = (
    "#000000", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#999999",
    "#f0e442", "#882255",
)  # fmt: skip
COLORS = dict(zip(("dense", *SPARSE), _COLORS, strict=True))


def draw(tier: str, found: dict[tuple[str, str], Losses], out: Path) -> Path | None:
    """Plots loss by position minus dense, with 95 % intervals and the ±0.5 % corridor.

    One panel shows the models as trained, the other the same models with dense attention. Returns
    the file; None without a dense and a sparse arm.
    """
    dense = found.get(("dense", "dense"))
    own = [arm for arm in SPARSE if (arm, "dense") in found]
    if dense is None or not own:
        return None
    figure = Figure(figsize=(10, 4.8))
    panels = figure.subplots(1, 2, sharey=True)
    first = min(FIRST_BUCKET, len(dense.counts) - 1)
    x = 2.0 ** np.arange(first, len(dense.counts))
    corridor = EQUAL * dense.means.mean((0, 1))[first:]
    for axes, how in zip(panels, ("as trained", "densely"), strict=True):
        axes.fill_between(x, -corridor, corridor, color="0.9", label="±0.5 % of dense")
        for arm in own:
            losses = found.get((arm, own_pattern(arm) if how == "as trained" else "dense"))
            if losses is not None:
                label = f"{arm} ({len(losses.seeds)} seeds)"
                _curve(axes, x, paired(losses, dense)[..., first:], COLORS[arm], label)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, bucket_names(len(dense.counts))[first:])
        axes.set_xlabel("tokens before, from")
        axes.set_title(f"used {how}")
    # Linear up to twice the corridor and logarithmic beyond, for outliers.
    near = 2 * float(corridor.max())
    if max(map(abs, panels[0].get_ylim())) > 3 * near:
        panels[0].set_yscale("symlog", linthresh=near, linscale=2.5)
        low, high = panels[0].get_ylim()
        ticks = [t for t in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if t <= high]
        panels[0].set_yticks([0, *ticks, *(-t for t in ticks if -t >= low)])
        panels[0].yaxis.set_major_formatter("{x:g}")
        panels[0].minorticks_off()
    panels[0].set_ylabel("held-out loss minus dense / dense, nats")
    figure.suptitle(f"tier {tier}: trained sparse, against dense trained and used")
    # The dense panel has all curves; some models are evaluated with dense attention only.
    handles, labels = panels[1].get_legend_handles_labels()
    columns = 4
    rows = -(-len(labels) // columns)
    figure.tight_layout(rect=(0, 0.05 * rows, 1, 1))
    figure.legend(handles, labels, loc="lower center", ncol=columns, fontsize=8)
    path = out / f"{tier}-loss-by-position.png"
    figure.savefig(path, dpi=120)
    return path


def _curve(axes: object, x: np.ndarray, difference: np.ndarray, color: str, label: str) -> None:
    """Plots means and intervals of differences [seeds, sequences, buckets]."""
    bands = [band(difference[..., k]) for k in range(difference.shape[-1])]
    axes.plot(x, [b.mean for b in bands], marker="o", color=color, label=label)
    low, high = [b.low for b in bands], [b.high for b in bands]
    axes.fill_between(x, low, high, color=color, alpha=0.15)


def draw_training(tier: str, lines: Iterable[Line], out: Path) -> Path | None:
    """Plots the training loss of each arm, and its difference to dense on the same batches.

    Both are means over seeds and over a tenth of the steps, differences with two standard errors.
    Returns the file; None without a dense and a sparse arm.
    """
    losses: dict[str, dict[tuple[int, int], float]] = {}
    for line in lines:
        if line["what"] == "train" and line["tier"] == tier:
            losses.setdefault(line["trained"], {})[line["seed"], line["step"]] = line["loss"]
    dense = losses.pop("dense", {})
    shared = {
        arm: sorted(dense.keys() & own.keys(), key=lambda x: x[1]) for arm, own in losses.items()
    }
    shared = {arm: keys for arm, keys in shared.items() if len(keys) > 1}
    if not shared:
        return None
    figure = Figure(figsize=(9, 3.4))
    levels, differences = figure.subplots(1, 2)
    drawn = [("dense", max(shared.values(), key=len), dense)]
    drawn += [(arm, keys, losses[arm]) for arm, keys in shared.items()]
    for arm, keys, own in drawn:
        width = max(2, len(keys) // 10)
        steps = _running(np.array([step for _, step in keys], float), width)[0]
        level, _ = _running(np.array([own[key] for key in keys]), width)
        mean, error = _running(np.array([own[key] - dense[key] for key in keys]), width)
        levels.plot(steps, level, color=COLORS[arm], label=arm)
        differences.plot(steps, mean, color=COLORS[arm])
        if arm != "dense":
            low, high = mean - 2 * error, mean + 2 * error
            differences.fill_between(steps, low, high, color=COLORS[arm], alpha=0.15)
    levels.set_title("training loss, nats")
    differences.set_title("minus dense on the same batches")
    for axes in (levels, differences):
        axes.set_xlabel("step, mean over a tenth of all")
    levels.legend(fontsize=8)
    figure.suptitle(f"tier {tier}, while training")
    figure.tight_layout()
    path = out / f"{tier}-training.png"
    figure.savefig(path, dpi=90)
    return path


def _running(values: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Means of `width` neighbors and their standard errors."""
    windows = np.lib.stride_tricks.sliding_window_view(values, width)
    return windows.mean(-1), windows.std(-1, ddof=1) / width**0.5
