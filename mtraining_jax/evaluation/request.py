"""What the command line asks of an evaluation. Does not import JAX."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Request:
    """The parsed arguments.

    Attributes:
        models: folders by their label in the results.
        tasks: task names, not validated.
        lengths: tokens.
        attentions: "dense", "sparse" or both.
        samples: number of samples per task and length.
        seed: random seed of the samples.
        generate: whether to generate answers even where teacher forcing is enough.
        sparse_answers: whether given answers use sparse attention too.
        output: folder of the results.
        options: options of tasks, as text.
        sparsity, parallel: fields of these sections, as text.
        dtype: compute dtype; None uses that of the model.
        tokenizer: "bytes" or a tokenizer.json; None uses that of the model.
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
