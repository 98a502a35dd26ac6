"""The command that tokenises a corpus once: `python -m mtraining_jax.tokenize --help`."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mtraining_jax.argument_parser import ArgumentParser
from mtraining_jax.cli import parse_command_line
from mtraining_jax.config import load_config
from mtraining_jax.data.tokenizing import Totals, tokenize_corpus
from mtraining_jax.errors import UserError, print_error
from mtraining_jax.wording import counted

_USAGE = """\
usage: python -m mtraining_jax.tokenize --out FOLDER --config NAME [options]

Turns the documents of a run's [data] into token files, which runs then read without a tokenizer,
as --data.source=tokens --data.paths='["FOLDER"]'. Started again after it was stopped, it goes on.

  --out FOLDER     where the token files go: a new folder, or that of the same command before
  --config NAME    the run, as of train.py; data.source, its fields, data.tokenizer, data.eos and
                   the size of the model's vocabulary are read
  --SECTION.FIELD=VALUE
                   fields of the run, as of train.py
  --processes N    that tokenise (default: one a processor)
  --help           print this text and stop
"""

_SECONDS_BETWEEN_LINES = 10


class _Progress:
    """A bar on a terminal, a line every few seconds elsewhere; for a `with` block."""

    def __init__(self, console: Console) -> None:
        self._console, self._begin = console, time.monotonic()
        self._last = self._begin
        self._bar = None
        if console.is_terminal:
            self._bar = Progress(
                BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
            )
            # How much there is to read is not known before it is read: the bar only moves.
            self._task = self._bar.add_task("reading", total=None)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, totals: Totals, read: int) -> None:
        """Shows how far it has come; see `tokenize_corpus`."""
        now = time.monotonic()
        speed = read / 2**20 / max(now - self._begin, 1e-3)
        line = f"read {read / 2**20:,.0f} MiB ({speed:,.1f} a second), written {_words(totals)}"
        if self._bar is not None:
            self._bar.update(self._task, description=line)
        elif now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            self._console.print(line, markup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: without the program's name; None takes those of this process.

    Returns:
        The exit status: 0, or 2 after a mistake that the user can correct, reported on stderr.
    """
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        return print_error(error)


def _run(arguments: list[str]) -> int:
    parser = ArgumentParser(
        prog="python -m mtraining_jax.tokenize", allow_abbrev=False, add_help=False
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", type=int, default=_processors())
    parser.add_argument("--help", "-h", action="store_true")
    own, rest = parser.parse_known_args(arguments)
    if own.help:
        print(_USAGE, end="")
        return 0
    if own.out is None:
        raise UserError("--out FOLDER is missing: where the token files go; --help tells more")
    if own.processes < 1:
        raise UserError(f"--processes={own.processes} must be at least 1")
    command = parse_command_line(rest)
    if command.config is None:
        raise UserError("--config NAME is missing: the run that will read the token files")
    config = load_config(command.config, command.overrides)
    console = Console(highlight=False, soft_wrap=True)
    begin = time.monotonic()
    try:
        with _Progress(console) as progress:
            totals = tokenize_corpus(
                config.data, config.model.vocab_size, own.out.expanduser(), own.processes, progress
            )
    except KeyboardInterrupt:
        raise UserError("interrupted; the same command goes on") from None
    there = f", {counted(totals.found, 'part')} of them from before" if totals.found else ""
    console.print(
        f"{own.out}: {_words(totals)}{there}, in {time.monotonic() - begin:,.1f} s", markup=False
    )
    console.print(f"train with  --data.source=tokens --data.paths='[\"{own.out}\"]'", markup=False)
    return 0


def _words(totals: Totals) -> str:
    return (
        f"{counted(totals.documents, 'document')}, {totals.tokens:,} tokens in "
        f"{counted(totals.parts, 'part')}"
    )


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
