"""Plots of a tier: loss by position, loss by training time, needles by length and depth."""

from pathlib import Path

import numpy as np

from experiments.compare import FIRST_BUCKET, Losses, band, paired
from experiments.decision import EQUAL
from experiments.result_lines import Line
from experiments.steps import seconds
from experiments.variants import SPARSE, own_pattern
from mtraining_jax.models.position_buckets import bucket_names

# One color for each arm in all plots, from a color-blind safe palette.
_COLORS = (
    "#000000", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#999999",
    "#f0e442", "#882255",
)  # fmt: skip
COLORS = dict(zip(("dense", *SPARSE), _COLORS, strict=True))


def draw(
    lines: list[Line], tier: str, found: dict[tuple[str, str], Losses], out: Path
) -> list[Path]:
    """Draws the plots that the results have data for; returns their files."""
    import matplotlib

    matplotlib.use("Agg")
    paths = [_by_position(tier, found, out), _against_time(lines, tier, out)]
    return [path for path in [*paths, _needles(lines, tier, out)] if path is not None]


def _save(figure: object, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _seeds(losses: Losses) -> str:
    return f"{len(losses.seeds)} seed" + ("s" if len(losses.seeds) > 1 else "")


def _by_position(tier: str, found: dict[tuple[str, str], Losses], out: Path) -> Path | None:
    """Loss by position minus dense, with 95 % intervals and the ±0.5 % corridor.

    One panel shows the models as trained, the other the same models with dense attention.
    """
    from matplotlib import pyplot

    dense = found.get(("dense", "dense"))
    own = [arm for arm in SPARSE if (arm, "dense") in found]
    if dense is None or not own:
        return None
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.8), sharey=True)
    first = min(FIRST_BUCKET, len(dense.counts) - 1)
    x = 2.0 ** np.arange(first, len(dense.counts))
    corridor = EQUAL * dense.means.mean((0, 1))[first:]
    for axes, how in zip(panels, ("as trained", "densely"), strict=True):
        axes.fill_between(x, -corridor, corridor, color="0.9", label="±0.5 % of dense")
        for arm in own:
            losses = found.get((arm, own_pattern(arm) if how == "as trained" else "dense"))
            if losses is not None:
                label = f"{arm} ({_seeds(losses)})"
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
    return _save(figure, out / f"{tier}-loss-by-position.png")


def _curve(axes: object, x: np.ndarray, difference: np.ndarray, color: str, label: str) -> None:
    """Plots means and intervals of differences [seeds, sequences, buckets]."""
    bands = [band(difference[..., k]) for k in range(difference.shape[-1])]
    axes.plot(x, [b.mean for b in bands], marker="o", color=color, label=label)
    low, high = [b.low for b in bands], [b.high for b in bands]
    axes.fill_between(x, low, high, color=color, alpha=0.15)


def _against_time(lines: list[Line], tier: str, out: Path) -> Path | None:
    """Smoothed training loss by training time, for runs with step times."""
    from matplotlib import pyplot

    by_run: dict[tuple[str, int], list[Line]] = {}
    for line in lines:
        if line["what"] == "train" and line["tier"] == tier:
            by_run.setdefault((line["trained"], line["seed"]), []).append(line)
    timed = {
        run: steps for run, steps in by_run.items() if all(x.get("step_seconds") for x in steps)
    }
    if not timed:
        return None
    figure, axes = pyplot.subplots(figsize=(7, 4))
    labelled = set()
    for (arm, _), steps in timed.items():
        times = seconds(steps)
        losses = np.array([x["loss"] for x in steps])
        width = max(1, len(losses) // 5)
        smooth = np.convolve(losses, np.full(width, 1 / width), "valid")
        label = None if arm in labelled else arm
        labelled.add(arm)
        axes.plot(times[width - 1 :], smooth, color=COLORS.get(arm), label=label)
    axes.set_xlabel("seconds of steps")
    axes.set_ylabel("training loss, nats")
    axes.set_title(f"tier {tier}")
    axes.legend(fontsize=8)
    figure.tight_layout()
    return _save(figure, out / f"{tier}-loss-by-time.png")


def _needles(lines: list[Line], tier: str, out: Path) -> Path | None:
    """Needle scores by length and depth, one panel for each (trained, inferred)."""
    from matplotlib import pyplot

    cells: dict[tuple[str, str], dict[tuple[int, float], list[float]]] = {}
    for line in lines:
        if line["what"] == "task" and line["tier"] == tier and line.get("depth") is not None:
            panel = cells.setdefault((line["trained"], line["inferred"]), {})
            panel.setdefault((line["length"], line["depth"]), []).append(line["score"])
    if not cells:
        return None
    columns = min(4, len(cells))
    rows = -(-len(cells) // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(3 * columns, 2.4 * rows), squeeze=False)
    for axes in grid.flat[len(cells) :]:
        axes.axis("off")
    for axes, (pair, panel) in zip(grid.flat, cells.items(), strict=False):
        lengths = sorted({length for length, _ in panel})
        depths = sorted({depth for _, depth in panel})
        table = [[np.mean(panel.get((n, d), [np.nan])) for n in lengths] for d in depths]
        axes.imshow(table, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(lengths)), [str(n) for n in lengths], fontsize=6)
        axes.set_yticks([0, len(depths) - 1], [f"{depths[0]:.1f}", f"{depths[-1]:.1f}"])
        count = len(next(iter(panel.values())))
        axes.set_title(f"{pair[0]} / {pair[1]}, {count} a cell", fontsize=7)
    figure.tight_layout()
    return _save(figure, out / f"{tier}-needles.png")
