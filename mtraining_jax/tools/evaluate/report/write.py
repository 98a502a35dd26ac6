"""Writes the report on a folder of results: terminal tables, results.md, pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from mtraining_jax.tools.evaluate.report.cells import Lines
from mtraining_jax.tools.evaluate.report.pictures import draw_all
from mtraining_jax.tools.evaluate.report.tables import settings_text, tables
from mtraining_jax.tools.evaluate.results import read_invocations, read_lines, read_settings
from mtraining_jax.utils.errors import UserError

REPORT_NAME = "results.md"


def write_report(folder: Path, console: Console) -> list[Path]:
    """Prints the tables of a folder, writes results.md and the pictures into it, returns the files.

    UserError if the folder has no results, or a damaged line.
    """
    lines = _lines(folder, read_settings(folder))
    for table in tables(lines):
        console.print(table.for_terminal())
    invocations = read_invocations(folder)
    pictures = []
    try:
        pictures = draw_all(lines, folder, _about(invocations[-1]) if invocations else "")
    except ImportError:
        console.print(
            "no pictures, because matplotlib is missing: uv run --extra plot, or pip install "
            "matplotlib",
            markup=False,
        )
    return [write_results(folder, pictures), *pictures]


def write_results(folder: Path, pictures: Sequence[Path] = ()) -> Path:
    """Writes results.md: the tables of a folder, with pictures in it; returns the file.

    UserError if the folder has no results, or a damaged line.
    """
    settings = read_settings(folder)
    lines = _lines(folder, settings)
    parts = [f"# Evaluation of {' and '.join(lines.models)}\n"]
    parts.append("\n".join(settings_text(settings)) + "\n")
    prompts = {line["prompt_hash"]: line["cut_tokens"] for line in lines.scored}
    if cut := [tokens for tokens in prompts.values() if tokens]:
        parts.append(
            f"{len(cut)} of {len(prompts)} prompts were too long; up to {max(cut)} tokens "
            "were removed from their middle, as their benchmark does.\n"
        )
    parts += [table.markdown() for table in tables(lines)]
    parts += [f"![{path.stem}]({path.name})\n" for path in pictures]
    parts.append("## Commands\n")
    commands = [f"- {_about(facts)}: `{facts['command']}`" for facts in read_invocations(folder)]
    parts.append("\n".join(commands) + "\n")
    report = folder / REPORT_NAME
    report.write_text("\n".join(parts), encoding="utf-8")
    return report


def _lines(folder: Path, settings: Mapping[str, Any]) -> Lines:
    names = {label: about["name"] for label, about in settings.get("models", {}).items()}
    if len(set(names.values())) < len(names):
        names = {}  # labels are distinct
    lines = Lines(x | {"model": names.get(x["model"], x["model"])} for x in read_lines(folder))
    if not lines.models:
        raise UserError(f"{folder} contains no evaluation results")
    return lines


def _about(facts: Mapping[str, str]) -> str:
    """Date, devices and versions of a call."""
    return "{date}, {devices}, {versions}".format(**facts)
