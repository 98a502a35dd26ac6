"""Command-line options that several benchmarks share."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

BACKENDS = ("xla", "mosaic_gpu", "triton")
UNIT = 2048  # tokens; lengths of attention are multiples


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option with an integer that has a lower limit."""

    def convert(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    convert.__name__ = "integer"  # in argparse's message about other text
    return convert


def length(text: str) -> int:
    """The type of an option with a length in tokens."""
    if (value := int(text)) % UNIT:
        raise argparse.ArgumentTypeError(f"{value} is not a multiple of {UNIT}")
    return value


_OPTIONS = {
    "heads": dict(type=int, default=16, help="query heads"),
    "kv-heads": dict(type=int, default=2, help="key/value heads"),
    "head-dim": dict(type=int, default=128),
    "backend": dict(choices=BACKENDS, help="kernels to run; default: the best ones here"),
    "repeats": dict(type=at_least(1), default=10, help="runs per median"),
    "seed": dict(type=int, default=0, help="seed of masks and inputs"),
    "workers": dict(
        type=at_least(0),
        default=max((os.cpu_count() or 2) // 2, 1),
        help="processes that compile at the same time; 0: everything in this process",
    ),
    "problem": dict(help=argparse.SUPPRESS),  # of a worker
    "out": dict(type=Path, metavar="FILE", help="also write the result to this file"),
    "config": dict(required=True, help="name or file of a configuration"),
    "longest-dense": dict(type=int, metavar="S", help="longest dense problem"),
}


def make_parser(doc: str, *names: str) -> argparse.ArgumentParser:
    """Returns a parser described by a module docstring, with some of the shared options."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in names:
        parser.add_argument(f"--{name}", **_OPTIONS[name])
    return parser


def overrides(texts: Sequence[str]) -> dict[str, str]:
    """Returns values by field, of configuration overrides, written as --FIELD=VALUE."""
    return dict(text.removeprefix("--").partition("=")[::2] for text in texts)
