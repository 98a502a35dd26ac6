r"""The record, table and picture of the frontier benchmark.

    python -m benchmarks.quality.frontier_report A.jsonl [B.jsonl ...] --out RESULT

joins the records of runs on the same texts into RESULT.md and RESULT.png. Ratios of time are each
run's own. The picture needs matplotlib: the extra "plot".
"""

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.patterns import family

Row = dict[str, Any]
PARTS = ("choose", "build", "forward", "backward")  # of the time that a layer's attention takes
_COLUMNS = (
    "pattern", "density", "executed", "keys a row", "rise", "± s.e.", "rise of far copies",
    "recall", "worst head", *PARTS, "together", "faster than dense",
)  # fmt: skip
# What must be equal in runs whose rows stand in one table.
_SAME = ("device", "seq_len", "sequences", "dtype", "model", "repeats", "timed_layers")
# Where a rise is drawn that is below what the picture resolves, or negative.
_LEAST = 1e-3
_GOALS = ((0.23, 2.8, 0.005, 0.02), (0.15, 4.5, 0.02, 0.05))  # density, speed, rise, of copies


class Record:
    """One run: its lines are on disk as soon as they are known.

    Args:
        path: of the files, without an ending.
        start: what the run is, and its dense losses and times.
    """

    def __init__(self, path: Path, start: Row) -> None:
        self._path, self._start, self._rows = path, start, []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write({"run": start}, "w")

    def add(self, row: Row) -> None:
        """Writes a line, and the table anew."""
        self._rows.append((row, self._start))
        self._write(row)
        self._path.with_suffix(".md").write_text(markdown(self._rows))

    def fail(self, text: str, error: Exception) -> None:
        """Writes that a setting could not be measured."""
        self._write({"pattern": text, "failed": str(error)})

    def draw(self) -> None:
        """Draws the picture, where matplotlib is."""
        if self._rows and importlib.util.find_spec("matplotlib"):
            draw(self._rows, self._path.with_suffix(".png"))

    def _write(self, line: Row, mode: str = "a") -> None:
        with open(self._path.with_suffix(".jsonl"), mode) as file:
            file.write(json.dumps(line) + "\n")


def read(paths: Sequence[Path]) -> list[tuple[Row, Row]]:
    """Rows of several records, each with its run; a later one replaces an earlier of its setting.

    Raises:
        ValueError: if the runs cannot stand in one table.
    """
    rows, first = {}, None
    for path in paths:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        start = lines[0]["run"]
        first = first or start
        for name in _SAME:
            if start[name] != first[name]:
                raise ValueError(f"{path}: {name} is {start[name]}, and {first[name]} before")
        rows |= {row["pattern"]: (row, start) for row in lines[1:] if "failed" not in row}
    return list(rows.values())


def speed(row: Row, start: Row) -> float | None:
    """Time of dense attention over that of a row, choice included; None if it was not taken."""
    if not row["times"]:
        return None
    return start["times"]["together"] / row["times"]["together"]


def dense_line(start: Row) -> str:
    """The dense losses and times of a run."""
    parts = [f"loss {start['loss']:.4f}"]
    if start["loss_copies"] is not None:
        parts.append(
            f"of far copies {start['loss_copies']:.3f} ({100 * start['share_copies']:.1f} % of "
            "tokens)"
        )
    if start["times"]:
        times = start["times"]
        parts.append(f"forward {times['forward']:.3f} ms, backward {times['backward']:.3f} ms")
    return ", ".join(parts)


def line(row: Row, start: Row) -> str:
    """A row while the run goes on."""
    cells = zip(_COLUMNS[1:], _cells(row, start)[1:], strict=True)
    return f"{row['pattern']}: " + ", ".join(f"{name} {x}" for name, x in cells if x != "–")


def markdown(rows: Sequence[tuple[Row, Row]]) -> str:
    """The whole document."""
    start = rows[0][1]
    settings = dict.fromkeys(run["setting"] for _, run in rows)
    text = [
        f"# Loss against density on {start['device']}",
        "",
        *(f"{setting}." for setting in settings),
        f"{start['model']}, {start['dtype']}, {start['sequences']} sequences of "
        f"{start['seq_len']} tokens. Dense: {dense_line(start)}.",
        "",
        "Sparse attention runs in every layer. Rise: loss minus that of dense attention, nats a "
        "token, with its standard error over sequences. Far copies: tokens that end a run of four "
        "which stood earlier, more than 256 tokens back and not nearer. Density: computed over "
        "causal pairs; executed: pairs in the tiles of the kernels over causal pairs. Recall: "
        f"share of exact attention's mass on computed pairs, on {start['recall_rows']} queries; "
        "worst head: the least of any layer and head.",
        "",
        f"Times of one layer, ms, means over layers {', '.join(map(str, start['timed_layers']))}, "
        f"each of another text, of medians of {start['repeats']}. build: what the kernels walk. "
        "Together: all four, one after another, with no wait between them. Faster than dense: the "
        "same of our own dense kernels in the same run, over it.",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + " --- |" * len(_COLUMNS),
        *("| " + " | ".join(_cells(row, run)) + " |" for row, run in rows),
    ]
    return "\n".join(text) + "\n"


def draw(rows: Sequence[tuple[Row, Row]], path: Path) -> None:
    """Rise against density and against speed, for all tokens and for far copies."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    timed = any(row["times"] for row, _ in rows)
    figure = Figure(figsize=(6.5 * (1 + timed), 9), layout="constrained")
    grid = figure.subplots(2, 1 + timed, squeeze=False, sharey="row")
    families = list(dict.fromkeys(family(row["pattern"]) for row, _ in rows))
    for below, (of_rise, title) in enumerate(
        (("rise", "all tokens"), ("rise_copies", "far copies"))
    ):
        for right in range(1 + timed):
            axes = grid[below][right]
            for number, name in enumerate(families):
                own = [(row, run) for row, run in rows if family(row["pattern"]) == name]
                points = sorted(
                    (speed(row, run) if right else row["density"], row[of_rise])
                    for row, run in own
                    if row[of_rise] is not None and (row["times"] or not right)
                )
                marker = "os^vDPX*<>"[(number + number // 10) % 10]  # colours repeat after ten
                axes.plot(
                    [x for x, _ in points], [max(y, _LEAST) for _, y in points],
                    marker=marker, color=f"C{number % 10}", label=name, linewidth=1,
                )
            for goal in _GOALS:
                axes.plot(goal[right], goal[2 + below], "k+", markersize=14, markeredgewidth=2)
            axes.set(xscale="log", yscale="log", ylabel=f"rise of loss, {title} (nats)")
            axes.set_xlabel("times faster than dense" if right else "density")
            axes.grid(True, which="both", alpha=0.25)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
                axis.set_minor_formatter(NullFormatter())
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    start = rows[0][1]
    figure.suptitle(
        f"{start['model']}, {start['seq_len']} tokens, {start['device']}; + marks goals; rises "
        f"below {_LEAST:g} are drawn there"
    )
    figure.savefig(path, dpi=110)


def _cells(row: Row, start: Row) -> list[str]:
    times, faster = row["times"], speed(row, start)
    numbers = [
        f"{row['density']:.3f}", f"{row['executed']:.3f}", f"{row['keys']:.0f}",
        _signed(row["rise"]), _plain(row["rise_error"]), _signed(row["rise_copies"]),
        f"{row['recall']:.3f}", f"{row['recall_worst']:.2f}",
    ]  # fmt: skip
    numbers += [f"{times[part]:.3f}" if times else "–" for part in (*PARTS, "together")]
    return [row["pattern"].replace(",", " "), *numbers, "–" if faster is None else f"{faster:.2f}"]


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.4f}"


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def main(argv: list[str] | None = None) -> None:
    """Joins records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORD.jsonl")
    parser.add_argument("--out", type=Path, required=True, metavar="RESULT")
    args = parser.parse_args(argv)
    try:
        rows = read(args.records)
    except (OSError, ValueError, KeyError, IndexError) as error:
        parser.error(f"these are no records of benchmarks.frontier in one table: {error}")
    if not rows:
        parser.error("the records hold no measured setting")
    args.out.with_suffix(".md").write_text(markdown(rows))
    draw(rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
