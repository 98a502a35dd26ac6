"""What the command line asks of an evaluation. Imports no JAX."""

from pathlib import Path
from typing import NamedTuple


class Request(NamedTuple):
    """The parsed arguments; see `evaluate.py --help`.

    Attributes:
        models: folders by their label in the results.
        tasks: task names, not validated.
        attentions: "dense", "sparse" or both, in this order.
        options: options of tasks, as text.
        overrides: dotted fields of the sections sparsity and parallel, as text.
    """

    models: dict[str, Path]
    tasks: list[str]
    lengths: list[int]
    attentions: tuple[str, ...]
    samples: int
    seed: int
    generate: bool
    sparse_answers: bool
    output: Path
    options: dict[str, str]
    overrides: list[tuple[str, str]]
    dtype: str | None
    tokenizer: str | None
    cpu_devices: int | None
