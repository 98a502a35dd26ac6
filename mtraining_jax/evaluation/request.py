"""What the command line asks of an evaluation. Imports no JAX."""

from pathlib import Path
from typing import NamedTuple


class Request(NamedTuple):
    """The parsed arguments; see `evaluate.py --help`."""

    models: dict[str, Path]  # by their label in the results
    tasks: list[str]  # not validated
    lengths: list[int]
    attentions: tuple[str, ...]  # "dense", "sparse" or both, in this order
    samples: int
    seed: int
    generate: bool
    sparse_answers: bool
    output: Path
    options: dict[str, str]  # of tasks
    overrides: list[tuple[str, str]]  # dotted fields of the sections sparsity and parallel
    dtype: str | None
    tokenizer: str | None
    cpu_devices: int | None
