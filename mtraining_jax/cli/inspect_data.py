"""Shows statistics of packed data: `python -m mtraining_jax.cli.inspect_data --help`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from mtraining_jax.cli.argument_parser import config_parser, parse_with_overrides, selected_config
from mtraining_jax.cli.model_command import run_command
from mtraining_jax.data.corpus import packs_of
from mtraining_jax.data.pack_report import report_on
from mtraining_jax.utils.errors import UserError

_USAGE = """\
usage: python -m mtraining_jax.cli.inspect_data --config NAME [options]

Prints how documents are packed into sequences (data.mode=pack or data.mask_documents=true):
document lengths, documents per sequence, padding, and how much the attention cost of sequences
varies.

  --config NAME    configuration of the run, as in train.py
  --SECTION.FIELD=VALUE
                   override a field, as in train.py
  --picture FILE   also write a plot (needs matplotlib)
  --help           print this help and exit
"""
_PICTURE_TYPES = (".png", ".pdf", ".svg", ".jpg")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, or 2 after a user error."""
    return run_command(arguments, lambda: _USAGE, _run)


def _run(arguments: list[str]) -> int:
    parser = config_parser("python -m mtraining_jax.cli.inspect_data")
    parser.add_argument("--picture", type=Path)
    options = parse_with_overrides(parser, arguments)
    if options.picture is not None:
        _check_picture(options.picture)
    config = selected_config(options)
    data, block_size = config.data, config.sparsity.block_size
    if not data.has_documents:
        raise UserError(
            f'data.mode = "{data.mode}" without data.mask_documents joins documents without '
            "packing them; set data.mode=pack or data.mask_documents=true"
        )
    corpus = data.source_options.open(data, config.model.vocab_size)
    packs = packs_of(corpus, data, block_size)
    print(f"{data.source}: {corpus.summary}; {packs.summary}")
    report = report_on(packs, data.seq_len, block_size)
    print(report)
    if options.picture is not None:
        report.draw(str(options.picture))
        print(f"picture: {options.picture}")
    return 0


def _check_picture(path: Path) -> None:
    """Raises UserError if the picture cannot be written, before the data is packed."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"--picture={path} must be a file in an existing folder")
    if path.suffix.lower() not in _PICTURE_TYPES:
        raise UserError(f"--picture={path} must end in one of {', '.join(_PICTURE_TYPES)}")


if __name__ == "__main__":
    sys.exit(main())
