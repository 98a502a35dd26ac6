"""Record, table and plot of the frontier benchmark."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.measure import PARTS
from benchmarks.quality.patterns import family
from benchmarks.report import table_head, table_line

Row = dict[str, Any]
_COLUMNS = (
    "pattern", "density", "executed", "keys per row", "loss increase", "± s.e.",
    "increase on far copies", "recall", "worst head", *PARTS, "together",
    "faster than dense",
)  # fmt: skip
_MIN_INCREASE = 1e-3  # smaller or negative increases are drawn here


class Record:
    """One run: its lines are written as soon as they are known.

    Args:
        path: of the files, without a suffix.
        start: settings of the run, and its dense losses and times.
    """

    def __init__(self, path: Path, start: Row) -> None:
        self._path, self._start, self._rows = path, start, []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write({"run": start}, "w")

    def add(self, row: Row) -> None:
        """Writes a line, and the table again."""
        self._rows.append(row)
        self._write(row)
        self._path.with_suffix(".md").write_text(markdown(self._start, self._rows))

    def fail(self, text: str, error: Exception) -> None:
        """Writes that a setting could not be measured."""
        self._write({"pattern": text, "failed": str(error)})

    def draw(self) -> None:
        """Draws the plot, if matplotlib is installed."""
        if self._rows and importlib.util.find_spec("matplotlib"):
            draw(self._start, self._rows, self._path.with_suffix(".png"))

    def _write(self, line: Row, mode: str = "a") -> None:
        with open(self._path.with_suffix(".jsonl"), mode) as file:
            file.write(json.dumps(line) + "\n")


def speed(row: Row, start: Row) -> float:
    """Time of dense attention over that of a row, including selection."""
    return start["times"]["together"] / row["times"]["together"]


def dense_line(start: Row) -> str:
    """The dense losses and times of a run."""
    parts = [f"loss {start['loss']:.4f}"]
    if start["loss_copies"] is not None:
        parts.append(
            f"of far copies {start['loss_copies']:.3f} ({100 * start['share_copies']:.1f} % of "
            "tokens)"
        )
    times = start["times"]
    parts.append(f"forward {times['forward']:.3f} ms, backward {times['backward']:.3f} ms")
    return ", ".join(parts)


def line(row: Row, start: Row) -> str:
    """A row as a line of progress."""
    cells = zip(_COLUMNS[1:], _cells(row, start)[1:], strict=True)
    return f"{row['pattern']}: " + ", ".join(f"{name} {x}" for name, x in cells if x != "–")


def markdown(start: Row, rows: Sequence[Row]) -> str:
    """The whole document."""
    text = [
        f"# Loss against density on {start['device']}",
        "",
        f"{start['setting']}. {start['model']}, {start['dtype']}, {start['sequences']} sequences "
        f"of {start['seq_len']} tokens. Dense: {dense_line(start)}.",
        "",
        "Sparse attention runs in every layer. Loss increase: over dense attention, nats per "
        "token, with its standard error over sequences. Far copies: tokens that end a run of four "
        "that occurred earlier, more than 256 tokens back and not nearer. Density: computed over "
        "causal pairs; executed: pairs in the tiles of the kernels over causal pairs. Recall: "
        f"attention mass on computed pairs, of {start['recall_rows']} queries; worst head: the "
        "lowest of any layer and head.",
        "",
        f"Times of one layer, ms, means over layers {', '.join(map(str, start['timed_layers']))}, "
        f"each on another text, of medians of {start['repeats']}; forward includes the lists for "
        "the kernels. Together: all parts, one after another without waits in between. Faster than "
        "dense: the same time of the dense kernels of the same run over it.",
        "",
        *table_head(_COLUMNS),
        *(table_line(_cells(row, start)) for row in rows),
    ]
    return "\n".join(text) + "\n"


def draw(start: Row, rows: Sequence[Row], path: Path) -> None:
    """Plots the loss increase against density and speedup, for all tokens and for far copies."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    kinds = {"rise": "all tokens"}
    if any(row["rise_copies"] is not None for row in rows):
        kinds["rise_copies"] = "far copies"
    figure = Figure(figsize=(13, 4.5 * len(kinds)), layout="constrained")
    grid = figure.subplots(len(kinds), 2, squeeze=False, sharey="row")
    families = list(dict.fromkeys(family(row["pattern"]) for row in rows))
    for (key, title), below in zip(kinds.items(), grid, strict=True):
        for right, axes in enumerate(below):
            for number, name in enumerate(families):
                points = sorted(
                    (speed(row, start) if right else row["density"], max(row[key], _MIN_INCREASE))
                    for row in rows
                    if family(row["pattern"]) == name and row[key] is not None
                )
                marker = "os^vDPX*<>"[(number + number // 10) % 10]  # colors repeat after ten
                axes.plot(
                    [x for x, _ in points], [y for _, y in points],
                    marker=marker, color=f"C{number % 10}", label=name, linewidth=1,
                )  # fmt: skip
            axes.set(xscale="log", yscale="log", ylabel=f"loss increase, {title} (nats)")
            axes.set_xlabel("times faster than dense" if right else "density")
            axes.grid(True, which="both", alpha=0.25)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
                axis.set_minor_formatter(NullFormatter())
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle(
        f"{start['model']}, {start['seq_len']} tokens, {start['device']}; increases below "
        f"{_MIN_INCREASE:g} are drawn there"
    )
    figure.savefig(path, dpi=110)


def _cells(row: Row, start: Row) -> list[str]:
    numbers = [
        f"{row['density']:.3f}", f"{row['executed']:.3f}", f"{row['keys']:.0f}",
        _number(row["rise"], "+.4f"), _number(row["rise_error"], ".4f"),
        _number(row["rise_copies"], "+.4f"), f"{row['recall']:.3f}", f"{row['recall_worst']:.2f}",
    ]  # fmt: skip
    numbers += [f"{row['times'][part]:.3f}" for part in (*PARTS, "together")]
    return [row["pattern"].replace(",", " "), *numbers, f"{speed(row, start):.2f}"]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"
