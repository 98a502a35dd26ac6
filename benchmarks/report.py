"""Markdown that the benchmarks print. Needs no JAX."""

import datetime
import importlib.metadata
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path


class Page:
    """Markdown that is printed and saved line by line, so that an aborted run keeps its rows.

    Args:
        out: file to write; None only prints.
    """

    def __init__(self, out: Path | None = None) -> None:
        self._out = out
        self._lines: list[str] = []

    def add(self, *lines: str) -> None:
        self._lines += lines
        print(*lines, sep="\n", flush=True)
        if self._out is not None:
            self._out.write_text(self.text, encoding="utf-8")

    @property
    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def table_line(cells: Iterable[str]) -> str:
    """A row of a markdown table."""
    return "| " + " | ".join(cells) + " |"


def table_head(columns: Sequence[str]) -> list[str]:
    """The first two lines of a markdown table."""
    return [table_line(columns), table_line(["---"] * len(columns))]


def number(value: float | None, digits: int = 2) -> str:
    """A number with `digits` decimals below 100 and one above; a dash for None."""
    if value is None:
        return "–"
    return f"{value:.{digits}f}" if abs(value) < 100 else f"{value:.1f}"


def setting(more: Sequence[str] = ()) -> str:
    """Date, driver and versions of a run, with `more` versions."""
    packages = {
        "jax": "jax", "jaxlib": "jaxlib", "CUDA plugin": "jax-cuda13-plugin",
        "cuDNN": "nvidia-cudnn-cu13",
    }  # fmt: skip
    versions = [f"{name} {found}" for name, x in packages.items() if (found := _version(x))]
    return f"{datetime.date.today()}, driver {_driver()}, {', '.join([*versions, *more])}"


def versions(*packages: str) -> str:
    """Those of the packages that are installed, with versions."""
    return ", ".join(f"{name} {found}" for name in packages if (found := _version(name)))


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
