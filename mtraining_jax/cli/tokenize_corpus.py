"""Command that pre-tokenizes a corpus: `python -m mtraining_jax.cli.tokenize_corpus --help`."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mtraining_jax.cli.argument_parser import ArgumentParser
from mtraining_jax.cli.train import parse_command_line
from mtraining_jax.config import load_config
from mtraining_jax.data.tokenizing import Totals, tokenize_corpus
from mtraining_jax.utils.errors import UserError, print_error
from mtraining_jax.utils.text import counted, print_text

_USAGE = """\
usage: python -m mtraining_jax.cli.tokenize_corpus --out FOLDER --config NAME [options]

Pre-tokenizes the documents of a run's [data] into token files, which runs then read with
--data.source=tokens --data.paths='["FOLDER"]'. If interrupted, the same command resumes.

  --out FOLDER     output folder for the token files: new, or from an interrupted command
  --config NAME    configuration of the run, as in train.py; uses data.source, its fields,
                   data.tokenizer, data.eos and model.vocab_size
  --SECTION.FIELD=VALUE
                   override a field, as in train.py
  --processes N    tokenizer processes (default: one per processor)
  --help           print this help and exit
"""

_SECONDS_BETWEEN_LINES = 10


class _Progress:
    """Context manager: a progress bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console, self._begin = console, time.monotonic()
        self._last = self._begin
        self._bar = None
        if console.is_terminal:
            self._bar = Progress(
                BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
            )
            # The total is unknown.
            self._task = self._bar.add_task("reading", total=None)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, totals: Totals, read: int) -> None:
        """Reports progress, as callback of `tokenize_corpus`."""
        now = time.monotonic()
        speed = read / 2**20 / max(now - self._begin, 1e-3)
        line = f"read {read / 2**20:,.0f} MiB ({speed:,.1f} MiB/s), wrote {_words(totals)}"
        if self._bar is not None:
            self._bar.update(self._task, description=line)
        elif now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            self._console.print(line, markup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, or 2 after a user error."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        return print_error(error)


def _run(arguments: list[str]) -> int:
    parser = ArgumentParser(
        prog="python -m mtraining_jax.cli.tokenize_corpus", allow_abbrev=False, add_help=False
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", type=int, default=_processors())
    parser.add_argument("--help", "-h", action="store_true")
    own, rest = parser.parse_known_args(arguments)
    if own.help:
        return print_text(_USAGE)
    if own.out is None:
        raise UserError("--out FOLDER, the folder for the token files, is missing; see --help")
    if own.processes < 1:
        raise UserError(f"--processes={own.processes} must be at least 1")
    command = parse_command_line(rest)
    if command.config is None:
        raise UserError("--config NAME, the run that will read the token files, is missing")
    config = load_config(command.config, command.overrides)
    console = Console(highlight=False, soft_wrap=True)
    begin = time.monotonic()
    try:
        with _Progress(console) as progress:
            totals = tokenize_corpus(
                config.data, config.model.vocab_size, own.out.expanduser(), own.processes, progress
            )
    except KeyboardInterrupt:
        raise UserError("interrupted; the same command resumes") from None
    resumed = f" ({totals.found:,} already there)" if totals.found else ""
    console.print(
        f"{own.out}: {_words(totals)}{resumed}, in {time.monotonic() - begin:,.1f} s", markup=False
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
