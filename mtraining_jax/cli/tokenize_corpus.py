"""Command that pre-tokenizes a corpus: `python -m mtraining_jax.cli.tokenize_corpus --help`."""

import os
import sys
import time
from collections.abc import Sequence

from mtraining_jax.cli.argument_parser import config_parser, parse_with_overrides, selected_config
from mtraining_jax.cli.model_command import at_least, output_folder, run_command
from mtraining_jax.tools.corpus.tokenizing import Totals, tokenize_corpus
from mtraining_jax.utils.console import Output
from mtraining_jax.utils.errors import UserError

_USAGE = """\
--out FOLDER --config NAME [options]

Pre-tokenizes the documents of a run's [data] into token files, which runs then read with
--data.source=tokens --data.paths='["FOLDER"]'. If interrupted, the same command resumes.

  --out FOLDER     output folder for the token files: new, or from an interrupted command
  --config NAME    configuration of the run, as in training; uses data.source, its fields,
                   data.tokenizer, data.eos, data.bos and model.vocab_size
  --SECTION.FIELD=VALUE
                   override a field, as in training
  --processes N    tokenizer processes (default: one per processor)
  --help [SECTION] print this help, or the fields of a section, and exit
"""

_SECONDS_BETWEEN_LINES = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, or 2 after a user error."""
    return run_command("tokenize_corpus", arguments, lambda: _USAGE, _run)


def _run(arguments: list[str]) -> int:
    parser = config_parser()
    parser.add_argument("--out", type=output_folder)
    parser.add_argument("--processes", type=at_least(1), default=_processors())
    options = parse_with_overrides(parser, arguments)
    if options.out is None:
        raise UserError("--out FOLDER, the folder for the token files, is missing; see --help")
    config, out = selected_config(options), options.out
    console = Output()
    begin = reported = time.monotonic()

    def report(totals: Totals, read: int) -> None:
        """Shows progress: on a terminal always, elsewhere as a line every few seconds."""
        nonlocal reported
        now = time.monotonic()
        speed = read / 2**20 / max(now - begin, 1e-3)
        line = f"read {read / 2**20:,.0f} MiB ({speed:,.1f} MiB/s), wrote {totals}"
        status.update(line)
        if not console.is_terminal and now - reported >= _SECONDS_BETWEEN_LINES:
            reported = now
            console.print(line)

    try:
        with console.status("reading") as status:
            totals = tokenize_corpus(
                config.data, config.model.vocab_size, out, options.processes, report
            )
    except KeyboardInterrupt:
        raise UserError("interrupted; the same command resumes") from None
    resumed = f" ({totals.found:,} already there)" if totals.found else ""
    console.print(
        f"{options.out}: {totals}{resumed}, in {time.monotonic() - begin:,.1f} s\n"
        f"train with  --data.source=tokens --data.paths='[\"{options.out}\"]'"
    )
    return 0


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
