"""The markdown that the attention benchmark writes."""

import datetime
import importlib.metadata
import subprocess
from collections.abc import Sequence

import jax

from benchmarks.kernels.cases import Row
from benchmarks.kernels.goals import ERROR_RATIO, progress

_COLUMNS = (
    "S", "heads, D", "mask", "who", "density (blocks + columns)", "choose + build ms", "fwd ms",
    "bwd ms", "total ms", "fwd / bwd TFLOP/s executed", "as if dense", "memory GB: temp (peak)",
    "of the goal",
)


def setting(more: Sequence[str] = ()) -> str:
    """Date, driver and versions of a run; `more` are versions as well."""
    versions = [f"jax {jax.__version__}", f"jaxlib {_version('jaxlib')}"]
    versions += [
        f"{name} {found}" for name, package in
        (("CUDA plugin", "jax-cuda13-plugin"), ("cuDNN", "nvidia-cudnn-cu13"))
        if (found := _version(package))
    ]
    return f"{datetime.date.today()}, driver {_driver()}, {', '.join([*versions, *more])}"


def header(seed: int, repeats: int, torch: str | None) -> str:
    """When, where and with what the run was made."""
    lines = [
        f"# Attention on {jax.devices()[0].device_kind}",
        "",
        f"{setting([torch] if torch else [])}. bf16, batch 1, "
        f"random inputs, seed {seed}, medians of {repeats}.",
        "",
        "Masks, per query head. A: block diagonals 0..7 and 8 random far ones, 1000 random "
        "columns. B: 6 % of the block diagonals (0..7 and random far ones), 3000 random columns. "
        "D: every block diagonal. F: a list of 128 x 128 blocks, random block diagonals and block "
        "columns.",
        "",
        "choose: top-p 0.9 of the last queries' attention, at most 4096 columns and 4096 "
        "diagonals; build: gathered columns and all lists that both passes read; total: choose, "
        "build, forward and backward as one program (forward + backward for the peers). "
        "TFLOP/s executed: 4 D (128 x 128 blocks + 128 columns) forward, 2.5 times that backward; "
        "as if dense: half of S x S instead. cuDNN and torch flash count half of S x S. reference: "
        "the Triton kernels of MTraining's authors on the same masks; its build makes their lists "
        "of given diagonals and columns, its backward pass adds atomically. Memory: of the whole "
        "program beyond its inputs and results, as the compiler reserves it and, where it was the "
        "largest of its process so far, as the device saw it. Of the goal: 1 or more meets it.",
        "",
        "",
    ]
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> str:
    """One line a row."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|" + " --- |" * len(_COLUMNS)]
    order = sorted(rows, key=lambda r: (-r.shape.dim, r.shape.seq_len, r.mask, r.who != "ours"))
    lines += ["| " + " | ".join(_cells(row, rows)) + " |" for row in order]
    return "\n".join(lines) + "\n"


def line(row: Row) -> str:
    """A row while the run goes on."""
    return ", ".join(
        f"{name} {text}" for name, text in zip(_COLUMNS, _cells(row, []), strict=True)
        if text not in ("", "–")
    )


def error_table(
    errors: dict[int, dict[tuple[str, str], dict[str, float]]], seq_len: int
) -> str:
    """Errors by head dim, mask and who, and the largest ratio to cuDNN's on the dense mask."""
    lines = [
        f"Relative error against fp32 at S = {seq_len} (norm of the difference over norm of the "
        f"reference); goal: at most {ERROR_RATIO} times cuDNN's on the dense mask.",
        "",
        "| D | mask | who | out | dq | dk | dv | largest ratio to cuDNN's |",
        "|" + " --- |" * 8,
    ]
    for dim, found in errors.items():
        peer = found.get(("D", "cuDNN"))
        for (mask, who), values in found.items():
            ratio = "–"
            if peer and who == "ours":
                ratio = f"{max(values[name] / peer[name] for name in values):.3f}"
            cells = [str(dim), mask, who, *(f"{x:.3e}" for x in values.values()), ratio]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    shape, (blocks, columns) = row.shape, row.density()
    density = f"{blocks:.4f}" + (f" + {columns:.4f}" if columns else "")
    build = " + ".join(f"{x:.2f}" for x in (row.choose, row.build) if x is not None)
    rates = [row.rates(which) for which in ("forward", "backward")]
    memory = "–"
    if row.temp is not None:
        memory = f"{row.temp / 1e9:.2f}" + (f" ({row.peak / 1e9:.2f})" if row.peak else "")
    return [
        str(shape.seq_len), f"{shape.heads}/{shape.kv_heads}, {shape.dim}", row.mask, row.who,
        density, build or "–", _ms(row.forward), _ms(row.backward), _ms(row.total),
        *(" / ".join(f"{r[i]:.0f}" if r else "–" for r in rates) for i in range(2)),
        memory, "; ".join(progress(row, rows)),
    ]


def _ms(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return found.splitlines()[0].strip()
