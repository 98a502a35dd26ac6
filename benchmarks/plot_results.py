"""Draws the tables of a training step and of attention as one picture, for the README.

    python benchmarks/plot_results.py STEPS.md ATTENTION.md PICTURE.png

STEPS.md has the traces of a sparse and of a dense step, in this order; ATTENTION.md is the table of
`benchmarks/attention.py`. Needs matplotlib: the extra "plot".
"""

import argparse
from pathlib import Path

SEQ_LEN = 131072  # of the attention table
BARS = (  # (mask, who) in the table, and the name in the picture
    ("D", "cuDNN", "dense, cuDNN"),
    ("D", "ours", "dense, ours"),
    ("F", "FlexAttention", "6 % as blocks, FlexAttention"),
    ("F", "ours", "6 % as blocks, ours"),
    ("B", "ours", "9 %, verticals and slashes, ours"),
)
COLORS = {"attention": "#c44e52", "all else": "#e3b7a0", "ours": "#c44e52", "other": "#8c8c8c"}


def rows(text: str, *starts: str) -> list[list[str]]:
    """Cells of the lines of markdown tables whose first cells are these."""
    cells = [[x.strip() for x in line.strip("|").split("|")] for line in text.splitlines()]
    return [row for row in cells if tuple(row[: len(starts)]) == starts]


def step_times(text: str) -> list[tuple[float, float]]:
    """Seconds of attention and of all else, of the sparse and of the dense trace.

    Raises:
        ValueError: if there are not two traces.
    """
    steps = [float(row[1]) / 1e3 for row in rows(text, "step") if len(row) > 4]
    attention = [float(row[1]) / 1e3 for row in rows(text, "attention kernels")]
    if not len(steps) == len(attention) == 2:
        raise ValueError(f"{len(steps)} traces of a step, where a sparse and a dense one belong")
    return [(a, s - a) for a, s in zip(attention, steps, strict=True)]


def attention_times(text: str) -> list[tuple[str, float]]:
    """Name and ms of a layer's forward and backward, choosing and building included.

    Raises:
        ValueError: if a row is missing.
    """
    found = []
    for mask, who, name in BARS:
        of_bar = rows(text, str(SEQ_LEN), "16/2, 128", mask, who)
        if len(of_bar) != 1:
            raise ValueError(f"{len(of_bar)} rows of mask {mask} by {who} at {SEQ_LEN} tokens")
        found.append((name, float(of_bar[0][8])))
    return found


def draw(steps: list[tuple[float, float]], layer: list[tuple[str, float]], path: Path) -> None:
    """Writes the picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2, 3])
    names = ["sparse, 6 %", "dense"]
    starts = [0.0] * len(names)
    for part, values in zip(("attention", "all else"), zip(*steps, strict=True), strict=True):
        left.barh(names, values, left=starts, color=COLORS[part], label=part)
        starts = [a + b for a, b in zip(starts, values, strict=True)]
    for name, total in zip(names, starts, strict=True):
        left.text(total, name, f" {total:.1f} s", va="center")
    left.set_xlim(0, 1.2 * max(starts))
    left.set_title("A training step of Qwen2.5-3B\n524288 tokens, eight H200", fontsize=10)
    left.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.02), fontsize=9)
    for name, ms in layer[::-1]:
        color = COLORS["ours" if name.endswith("ours") else "other"]
        right.barh([name], [ms], color=color)
        right.text(ms, name, f" {ms:.0f} ms", va="center")
    right.set_xlim(0, 1.15 * max(ms for _, ms in layer))
    right.set_title(
        f"Attention of a layer, forward and backward\n{SEQ_LEN} tokens, one H200", fontsize=10
    )
    for axes in (left, right):
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    """Reads the tables and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("steps", "attention", "picture"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args(argv)
    times = []
    for path, read in ((args.steps, step_times), (args.attention, attention_times)):
        if not path.is_file():
            parser.error(f"{path}: no such file")
        try:
            times.append(read(path.read_text()))
        except ValueError as error:
            parser.error(f"{path}: {error}")
    draw(*times, args.picture)


if __name__ == "__main__":
    main()
