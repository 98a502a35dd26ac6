"""Picture of the rates of attention kernels on the same lists."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.peers.problems import Problem

# From a color-blind safe palette, in the order of rows; further kernels are not drawn.
_COLORS = "#d55e00", "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#999999", "#000000"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws TFLOP/s forward and backward by problem, hollow where bits did not repeat.

    Args:
        rows: one result per problem, kernels and GPU. Only those of the first GPU are drawn, and
            nothing if none has times.
        path: of the PNG.
    """
    rows = [row for row in rows if "forward" in row]
    rows = [row for row in rows if row["device"] == rows[0]["device"]]
    if not rows:
        return
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    kernels = list(dict.fromkeys(row["kernels"] for row in rows))[: len(_COLORS)]
    figure = Figure(figsize=(10, 1.3 + 0.34 * len(problems)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, which, factor in zip(panels, ("forward", "backward"), (1, 2.5), strict=True):
        colors = list(zip(kernels, _COLORS, strict=False))
        for kernel, color in colors:
            axes.scatter([], [], s=42, c=color, label=kernel)
        for kernel, color in reversed(colors):
            own = [row for row in rows if row["kernels"] == kernel and which in row]
            rates = [factor * row["flops"] / row[which] / 1e9 for row in own]
            places = [problems.index(row["problem"]) for row in own]
            fills = [color if row.get(f"{which}_repeats") else "none" for row in own]
            axes.scatter(rates, places, s=42, c=fills, edgecolors=color)
        axes.set_xlim(left=0)
        axes.set_xlabel("TFLOP/s of computed blocks")
        axes.set_title(f"{which} (hollow: bits did not repeat)")
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
    panels[0].set_yticks(range(len(problems)), [_label(x) for x in problems])
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(f"Attention kernels on the same lists, {rows[0]['device']}")
    figure.savefig(path, dpi=80)


def _label(name: str) -> str:
    problem = Problem.parse(name)
    listed = problem.listed if problem.kind == "dense" else f"{problem.listed} a row"
    shape = f"{problem.seq_len} x {problem.batch}, {problem.heads}/{problem.kv_heads}"
    return f"{shape} of {problem.dim}, {listed}"
