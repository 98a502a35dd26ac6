"""Charts as HTML figures: SVG that scales with the page and takes its text color."""

import base64
import html
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtraining_jax.tools.report.runs import Run
from mtraining_jax.utils.file_limits import MIB, check_size
from mtraining_jax.utils.text import short_power

# Legible on white and on black.
COLORS = ("#3b82f6", "#f97316", "#10a37f", "#a855f7", "#e5484d", "#8d8d8d", "#d4a017", "#06a6c9")
_DASHES = {"-": "solid", "--": "dashed", ":": "dotted"}  # and their names in CSS
_INK = "#010203"  # replaced by the text color of the page
_SIZE = 4.8, 2.8  # inches of 72 units; a phone shows about 330 units
_MAX_POINTS, _MAX_COLUMNS, _MAX_TIPS = 250, 60, 40
_SHOWN = 1e-3  # precision of fractions on the page
_ROUNDING = 1e-5  # largest relative error of rounding
_MOST_PIXELS = 2**25  # of a picture; one of 8 masks has a million
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "page", "text.parse_math": False, "font.size": 11.5,
    "axes.edgecolor": _INK, "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
    "text.color": _INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.linewidth": 0.7, "ytick.left": False, "xtick.bottom": False,
    "lines.linewidth": 1.6, "lines.markersize": 3.5,
}  # fmt: skip


class Chart(NamedTuple):
    """Metrics of all runs over steps or positions, as names and labels."""

    title: str
    unit: str  # beginning with % for fractions
    metrics: dict[str, str]
    first: int = 0  # step to begin with, of speed: values above 3 medians are cut


def line_chart(chart: Chart, runs: Sequence[Run]) -> str:
    """Draws a chart; empty if no run has any of its metrics."""
    curves = []
    for i, run in enumerate(runs):
        for name in chart.metrics:
            steps, values = run.curve(name)
            if (shown := steps >= chart.first).any():
                curves.append((i, name, steps[shown], values[shown]))
    if not curves:
        return ""
    from matplotlib.ticker import EngFormatter, LogLocator, PercentFormatter

    figure, axes = _axes()
    names = [name for name in chart.metrics if name in {curve[1] for curve in curves}]
    single, windows = len(runs) == 1, []
    for i, name, steps, values in curves:
        number = names.index(name)
        color = COLORS[(number if single else i) % len(COLORS)]
        dash = list(_DASHES)[number % len(_DASHES)]
        window = len(values) // 20 if name == "loss" else 1
        if window > 1:
            axes.plot(*_thinned(steps, values, _MAX_POINTS), color=color, alpha=0.3, linewidth=0.8)
            values = np.convolve(values, np.ones(window) / window, "valid")
            steps = steps[window - 1 :]
            windows.append(window)
        marker = "o" if len(steps) <= 30 else ""
        axes.plot(*_thinned(steps, values, _MAX_POINTS), dash, color=color, marker=marker)
    _hide_rounding(axes, np.concatenate([x for *_, x in curves]), chart.unit.startswith("%"))
    if chart.unit.startswith("%"):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif "grad_norm" in names:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    elif axes.get_ylim()[1] >= 1000:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis="y", alpha=0.2, color=_INK, linewidth=0.6)
    if names[0].endswith("_by_position"):
        count = max(len(curve[2]) for curve in curves)
        shown = range(0, count, -(-count // 6))
        axes.set_xticks(list(shown), [short_power(2**k) for k in shown])
        axes.set_xlabel("position, from this power of two to the next")
    else:
        _step_axis(axes)
    if chart.first:
        top = 3 * np.median(np.concatenate([values for *_, values in curves]))
        axes.set_ylim(0, min(top, axes.get_ylim()[1]))
    drawn = sorted({i for i, *_ in curves})
    keys = [] if single else [key(COLORS[i % len(COLORS)], runs[i].name) for i in drawn]
    for i, name in enumerate(names if len(names) > 1 else ()):
        color = COLORS[i % len(COLORS)] if single else "currentColor"
        keys.append(key(color, chart.metrics[name], list(_DASHES.values())[i % len(_DASHES)]))
    svg = _svg(figure, chart.title)  # places the axes
    shown = {
        f"{'' if single else runs[i].name} {chart.metrics[name] if len(names) > 1 else ''}": points
        for i, name, *points in curves
    }
    tips = _tips(axes, chart.unit, shown)
    svg = svg.replace("</svg>", f"<g>{tips}</g></svg>")
    if windows:
        least, most = min(windows), max(windows)
        of = f"{least}" if least == most else f"{least} to {most}"
        keys.append(f"<br>Bold: mean over {of} steps.")
    return figure_of(chart.title, chart.unit, svg, keys)


def heat_map(run: Run, name: str, title: str) -> str:
    """Draws a metric by layer, or layer and head, over steps; empty if it has no two values."""
    steps, values = run.grid(name)
    if not np.isfinite(values).any() or np.nanmax(values) - np.nanmin(values) < _SHOWN:
        return ""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    layers, heads = values.shape[1], values[0, 0].size
    steps, values = _thinned(steps, values.reshape(len(steps), -1), _MAX_COLUMNS)
    steps, values = _evenly_spaced(steps, values)
    low, high = np.nanmin(values), np.nanmax(values)
    figure, axes = _axes()
    half = (steps[-1] - steps[0]) / max(1, len(steps) - 1) / 2 or 0.5
    extent = steps[0] - half, steps[-1] + half, layers - 0.5, -0.5
    colors = colormaps["viridis"]
    axes.imshow(
        values.T, "viridis", aspect="auto", interpolation="none", vmin=low, vmax=high, extent=extent
    )
    for layer in range(1, layers if 1 < heads and layers <= 40 else 0):
        axes.axhline(layer - 0.5, color="white", linewidth=0.6)
    axes.set_yticks(range(0, layers, -(-layers // 8)))
    axes.set_ylabel("layer")
    _step_axis(axes)
    stops = ",".join(to_hex(colors(x)) for x in np.linspace(0, 1, 6))
    bar = f'<i class="scale" style="background:linear-gradient(90deg,{stops})"></i>'
    unit = f"{heads} heads of each layer from top to bottom" if heads > 1 else ""
    digits = 0 if high - low >= 0.01 else 1
    legend = f"{low:.{digits}%} {bar} {high:.{digits}%}"
    return figure_of(title, unit, _svg(figure, title), [legend])


def picture(path: Path, title: str) -> str:
    """Embeds a picture, reduced to 32 colors; empty if damaged, too large, or being written."""
    from PIL import Image

    file = io.BytesIO()
    try:
        check_size(path, 16 * MIB)
        with Image.open(path, formats=["PNG"]) as image:
            if image.width * image.height > _MOST_PIXELS:
                return ""
            image.convert("RGB").quantize(32).save(file, "PNG", optimize=True)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return ""
    code = base64.b64encode(file.getvalue()).decode()
    body = f'<img alt="{html.escape(title)}" src="data:image/png;base64,{code}">'
    return figure_of(title, "", body, [])


def figure_of(title: str, unit: str, body: str, legend: Sequence[str]) -> str:
    """A figure with a title, its unit, and a legend of HTML below."""
    heading = f"{html.escape(title)} <small>{html.escape(unit)}</small>"
    return f"<figure><h3>{heading}</h3>{body}<figcaption>{' '.join(legend)}</figcaption></figure>"


def key(color: str, label: str, border: str = "solid") -> str:
    """An entry of a legend."""
    swatch = f'<i style="border-top:3px {border} {color}"></i>'
    return f'<span class="key">{swatch}{html.escape(label)}</span>'


def _axes() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    return figure, figure.add_subplot()


def _hide_rounding(axes: Any, values: np.ndarray, is_fraction: bool) -> None:
    """Widens a vertical axis of a smaller range than figures are shown with: the line is flat."""
    low, high = np.nanmin(values), np.nanmax(values)
    scale = 1.0 if is_fraction else abs(high)
    if high - low < scale * (_SHOWN if is_fraction else _ROUNDING):
        margin = 0.05 * scale
        top = min(high + margin, 1 + _SHOWN) if is_fraction else high + margin
        axes.set_ylim(low - margin, top)


def _tips(axes: Any, unit: str, curves: dict[str, list[np.ndarray]]) -> str:
    """Bands of a drawn chart that show the values of its curves under the mouse."""
    steps = np.unique(np.concatenate([steps for steps, _ in curves.values()]))
    steps = steps[np.linspace(0, len(steps) - 1, min(len(steps), _MAX_TIPS)).round().astype(int)]
    scale, box = 72 / axes.figure.dpi, axes.bbox
    x = axes.get_xaxis_transform().transform([(step, 0) for step in steps])[:, 0]
    edges = scale * np.array([box.x0, *(x[1:] + x[:-1]) / 2, box.x1])
    top = 72 * _SIZE[1] - scale * box.y1
    size = f'y="{top:.0f}" height="{scale * box.height:.0f}"'
    by_position, form = "position" in axes.get_xlabel(), ".2%" if unit.startswith("%") else ".4g"
    bands = []

    def place_of(step: float) -> str:
        return f"position {short_power(2 ** int(step))}" if by_position else f"step {step:,.0f}"

    for step, left, right in zip(steps, edges, edges[1:], strict=False):
        lines = [place_of(step)]
        for label, (known, values) in curves.items():
            nearest = int(np.abs(known - step).argmin())
            of = "" if known[nearest] == step else f" ({place_of(float(known[nearest]))})"
            lines.append(f"{label.strip()} {values[nearest]:{form}}{of}")
        text = "&#10;".join(html.escape(line.strip()) for line in lines)
        place = f'x="{left:.1f}" width="{right - left:.1f}"'
        bands.append(f"<rect {place} {size}><title>{text}</title></rect>")
    return "".join(bands)


def _step_axis(axes: Any) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if axes.get_xlim()[1] >= 10_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _evenly_spaced(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest values at equal distances, as columns of a picture have, if steps have others."""
    gaps = np.diff(steps)
    if len(np.unique(gaps)) < 2 or (gaps <= 0).any():
        return steps, values
    count = min(_MAX_COLUMNS, round((steps[-1] - steps[0]) / gaps.min()) + 1)
    even = np.linspace(steps[0], steps[-1], count)
    return even, values[np.abs(steps - even[:, None]).argmin(1)]


def _thinned(steps: np.ndarray, values: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Means over equal intervals, at most so many."""
    size = -(-len(steps) // most)

    def means(x: np.ndarray) -> np.ndarray:
        return np.array([x[i : i + size].mean(0) for i in range(0, len(x), size)])

    return means(steps), means(values)


def _svg(figure: Any, title: str) -> str:
    """Renders a figure as an SVG element, without what a page does not need."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    _, _, body = file.getvalue().partition("</defs>")  # of a style for all elements of the page
    # Names that are the same in all charts, fonts, turns by nothing and empty backgrounds.
    unwanted = r' id="[a-zA-Z0-9.]+_\d+"|font-family: [^;"]*; ?| transform="rotate\(-0 [^"]*"'
    body = re.sub(rf'{unwanted}|<path d="[^"]*" style="fill: none"/>', "", body)
    body = re.sub(r"\s+", " ", body).replace("> <", "><").replace(_INK, "currentColor")
    body = re.sub(r'(?<= d=")[^"]*', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), body)
    box = " ".join(f"{72 * side:g}" for side in _SIZE)
    return f'<svg viewBox="0 0 {box}" role="img" aria-label="{html.escape(title)}">{body}'
