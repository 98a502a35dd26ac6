"""Command-line options that several benchmarks share."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

BACKENDS = ("xla", "mosaic_gpu", "triton")
_OPTIONS = {
    "heads": dict(type=int, default=16, help="query heads"),
    "kv-heads": dict(type=int, default=2, help="key/value heads"),
    "head-dim": dict(type=int, default=128),
    "backend": dict(choices=BACKENDS, help="kernels to run; default: the best ones here"),
    "repeats": dict(type=int, default=10, help="runs per median"),
    "seed": dict(type=int, default=0, help="seed of masks and inputs"),
    "workers": dict(
        type=int,
        default=max((os.cpu_count() or 2) // 2, 1),
        help="processes that compile at the same time",
    ),
    "problem": dict(help=argparse.SUPPRESS),  # of a worker
    "out": dict(type=Path, metavar="FILE", help="also write the result to this file"),
}


def make_parser(doc: str, *names: str) -> argparse.ArgumentParser:
    """Returns a parser described by a module docstring, with some of the shared options."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in names:
        parser.add_argument(f"--{name}", **_OPTIONS[name])
    return parser


def overrides(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Returns field and value of configuration overrides, written as --FIELD=VALUE."""
    return [tuple(text.removeprefix("--").partition("=")[::2]) for text in texts]
