"""Writes an HTML page about runs: `python -m mtraining_jax.report runs/NAME ...`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from mtraining_jax.cli.argument_parser import ArgumentParser
from mtraining_jax.cli.model_command import expanded_path, run_command
from mtraining_jax.reporting import PAGE
from mtraining_jax.tools.report.page import write_page
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.text import print_text

_USAGE = """\
FOLDER ... [--output FILE]

Writes one HTML page about runs, with everything in one file: loss, density, recall, audits, speed
and memory, from FOLDER/metrics.jsonl. Several runs are drawn over each other. Needs matplotlib.

  FOLDER           run folder, e.g. runs/tiny
  --output FILE    default: FOLDER/report.html of one run, report.html here for several
  --help           print this help and exit
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, or 2 after a user error."""
    return run_command("report", arguments, lambda: _USAGE, _run)


def _run(arguments: list[str]) -> int:
    parser = ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("folders", nargs="*", type=expanded_path)
    parser.add_argument("--output", type=expanded_path)
    options = parser.parse_args(arguments)
    folders = options.folders
    if not folders:
        raise UserError("name a run folder, e.g. runs/tiny; see --help")
    for folder in folders:
        if sum(folder.resolve() == other.resolve() for other in folders) > 1:
            raise UserError(f"{folder} is given more than once; name each run folder once")
    default = folders[0] / PAGE if len(folders) == 1 else Path(PAGE)
    write_page(folders, out := options.output or default)
    return print_text(f"{out}\n")


if __name__ == "__main__":
    sys.exit(main())
