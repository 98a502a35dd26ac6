"""Writes the report on a folder of results: terminal tables, results.md, pictures."""

from pathlib import Path

from rich.console import Console

from mtraining_jax.evaluation.report.cells import Lines
from mtraining_jax.evaluation.report.pictures import draw_all
from mtraining_jax.evaluation.report.tables import settings_text, tables
from mtraining_jax.evaluation.results import read_invocations, read_lines, read_settings
from mtraining_jax.utils.errors import UserError

REPORT_NAME = "results.md"


def write_report(folder: Path, console: Console) -> list[Path]:
    """Prints the tables of a folder, writes results.md and the pictures into it, returns the files.

    UserError if the folder has no results, or a damaged line.
    """
    settings = read_settings(folder)
    names = {label: about["name"] for label, about in settings.get("models", {}).items()}
    if len(set(names.values())) < len(names):
        names = {}  # labels are distinct
    lines = Lines(x | {"model": names.get(x["model"], x["model"])} for x in read_lines(folder))
    if not lines.models:
        raise UserError(f"{folder} contains no evaluation results")
    # Each with date, devices and versions.
    invocations = [
        ("{date}, {devices}, {versions}".format(**facts), facts["command"])
        for facts in read_invocations(folder)
    ]
    made = list(tables(lines))
    for table in made:
        console.print(table.for_terminal())
    pictures = []
    try:
        pictures = draw_all(lines, folder, invocations[-1][0] if invocations else "")
    except ImportError:
        console.print(
            "no pictures, because matplotlib is missing: uv run --extra plot, or pip install "
            "matplotlib",
            markup=False,
        )
    parts = [f"# Evaluation of {' and '.join(lines.models)}\n"]
    parts.append("\n".join(settings_text(settings)) + "\n")
    if cut := [line["cut_tokens"] for line in lines.scored if line["cut_tokens"]]:
        parts.append(
            f"{len(cut)} of {len(lines.scored)} prompts were too long; up to {max(cut)} tokens "
            "were removed from their middle, as their benchmark does.\n"
        )
    parts += [table.markdown() for table in made]
    parts += [f"![{path.stem}]({path.name})\n" for path in pictures]
    parts.append("## Commands\n")
    parts.append("\n".join(f"- {facts}: `{command}`" for facts, command in invocations) + "\n")
    report = folder / REPORT_NAME
    report.write_text("\n".join(parts), encoding="utf-8")
    return [report, *pictures]
