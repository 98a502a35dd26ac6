"""Writes the report on a folder of results: terminal tables, results.md, pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from mtraining_jax.evaluation.report.cells import Lines
from mtraining_jax.evaluation.report.pictures import draw_all
from mtraining_jax.evaluation.report.tables import settings_text, tables
from mtraining_jax.evaluation.results import read_invocations, read_lines, read_settings
from mtraining_jax.utils.errors import UserError

REPORT_NAME = "results.md"


def write_report(folder: Path, console: Console) -> list[Path]:
    """Prints the tables of a folder, writes results.md and the pictures into it, returns the files.

    Raises:
        UserError: if the folder has no results, or a damaged line.
    """
    lines, settings = Lines(read_lines(folder)), read_settings(folder)
    if not lines.models:
        raise UserError(f"{folder} contains no evaluation results")
    about = settings.get("models", {})
    names = {label: about.get(label, {}).get("name", label) for label in lines.models}
    invocations = read_invocations(folder)
    made = list(tables(lines, names))
    for table in made:
        console.print(table.for_terminal())
    try:
        pictures = draw_all(lines, names, folder, _caption(invocations))
    except ImportError:
        console.print(
            "no pictures, because matplotlib is missing: uv run --extra plot, or pip install "
            "matplotlib",
            markup=False,
        )
        pictures = []
    title = " and ".join(names.values())
    parts = [
        f"# Evaluation of {title}\n",
        "\n".join(settings_text(settings)) + "\n",
        *_on_cut_prompts(lines),
        *(table.markdown() for table in made),
        *(f"![{path.stem}]({path.name})\n" for path in pictures),
        "## Commands\n",
        "\n".join(map(_invocation, invocations)) + "\n",
    ]
    report = folder / REPORT_NAME
    report.write_text("\n".join(parts), encoding="utf-8")
    return [report, *pictures]


def _on_cut_prompts(lines: Lines) -> list[str]:
    cut = [line["cut_tokens"] for line in lines.scored if line["cut_tokens"]]
    if not cut:
        return []
    return [
        f"{len(cut)} of {len(lines.scored)} prompts were too long; up to {max(cut)} tokens were "
        "removed from their middle, as their benchmark does.\n"
    ]


def _caption(invocations: Sequence[Mapping[str, Any]]) -> str:
    if not invocations:
        return ""
    last = invocations[-1]
    return f"{last['date']}, {last['devices']}, {last['versions']}"


def _invocation(facts: Mapping[str, Any]) -> str:
    return f"- {facts['date']}, {facts['devices']}, {facts['versions']}: `{facts['command']}`"
