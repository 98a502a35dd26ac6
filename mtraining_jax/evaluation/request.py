"""What the command line asks of an evaluation. Does not import JAX."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Request:
    """The parsed arguments; see `evaluate.py --help`.

    Attributes:
        models: folders by their label in the results.
        tasks: task names, not validated.
        attentions: "dense", "sparse" or both.
        options: options of tasks, as text.
        sparsity, parallel: fields of these sections, as text.
        dtype, tokenizer: None uses that of the model.
        cpu_devices: number of virtual CPU devices; None uses the devices that JAX finds.
    """

    models: Mapping[str, Path]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    attentions: tuple[str, ...]
    samples: int
    seed: int
    generate: bool
    sparse_answers: bool
    output: Path
    options: Mapping[str, str]
    sparsity: Mapping[str, str]
    parallel: Mapping[str, str]
    dtype: str | None
    tokenizer: str | None
    cpu_devices: int | None
