"""Measures settings of sparse patterns on a text, and proposes one of them for training."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.table import Column, Table

from mtraining_jax.data.documents import Encoder
from mtraining_jax.data.sources.text import TextFiles
from mtraining_jax.evaluation.engine.engine import Engine
from mtraining_jax.evaluation.far_copies import far_copies
from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.patterns.options.base import DenseOptions, PatternOptions
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.text import counted


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurement of one setting; losses are means in nats."""

    text: str  # the setting as the user wrote it
    density: float
    loss: float
    rise: float  # loss minus the loss with dense attention
    error: float | None  # standard error of the rise over sequences; None with a single one
    copies: float | None  # the rise over far copies only; None if the text has none
    step_seconds: float | None = None  # predicted for training; None if unknown


def proposed(measured: Sequence[Measured], most_rise: float, most_copies: float) -> Measured | None:
    """Returns the fastest setting within both limits, or that of lowest density; None without."""
    within = [
        one
        for one in measured
        if one.rise <= most_rise and (one.copies is None or one.copies <= most_copies)
    ]

    def cost(one: Measured) -> float:
        return one.density if one.step_seconds is None else one.step_seconds

    return min(within, key=cost, default=None)


def read_sequences(engine: Engine, paths: Sequence[str], length: int, count: int) -> np.ndarray:
    """Reads text files, joins them, and splits them into up to `count` sequences: int32 [N, S].

    `paths` are those of data.paths.
    """
    tokenizer = engine.loaded.needed_tokenizer()
    vocab_size = min(tokenizer.vocab_size, engine.vocab_size)
    encoder = Encoder(tokenizer, tokenizer.eos, vocab_size)
    files = TextFiles(paths=tuple(str(Path(path).expanduser()) for path in paths))
    found: list[np.ndarray] = []
    have = 0
    try:
        for where, text in files.documents():
            found.append(encoder.encode(text, where).ids)
            have += len(found[-1])
            if have >= length * count:
                break
    except UserError as error:
        raise UserError(str(error).replace("data.paths", "--text")) from None
    if have < length:
        raise UserError(f"--text has {have:,} tokens, fewer than one sequence of {length:,}")
    whole = min(have // length, count)
    return np.concatenate(found)[: whole * length].reshape(whole, length).astype(np.int32)


def check_length(engine: Engine, settings: Iterable[PatternOptions], length: int) -> None:
    """Checks that a length fits the model's positions, and that no setting would pad it."""
    if length > engine.max_positions:
        raise UserError(
            f"--length {length} is more than the {engine.max_positions} positions of "
            f"{engine.loaded.source} (model.max_position_embeddings)"
        )
    for one in settings:
        network = engine.with_pattern(one).loaded.network
        padded = network.padded_length(length)
        if padded != length:
            raise UserError(
                f"--length {length} would be padded to {padded} with blocks of {one.block_size} "
                f"tokens on {counted(network.ranks, 'device')}, which changes densities; "
                f"use --length {padded}"
            )


def measure(
    engine: Engine, sequences: np.ndarray, settings: Mapping[str, PatternOptions]
) -> Iterator[Measured]:
    """Runs a model over sequences, int32 [N, S], first dense, then with each setting."""
    far = np.stack([far_copies(tokens) for tokens in sequences])[:, 1:]
    dense = None
    block_size = next(iter(settings.values())).block_size
    for text, one in {"dense": DenseOptions(block_size), **settings}.items():
        programs = engine.with_pattern(one).programs
        losses, densities = [], []
        for tokens in sequences:
            labels = np.append(tokens[1:], np.int32(IGNORE_LABEL))
            scores, density = programs.score(tokens, labels)
            losses.append(scores.loss[:-1].astype(np.float64))
            densities.append(density)
        found = np.stack(losses)
        dense = found if dense is None else dense
        rises = found - dense
        means = rises.mean(1)
        yield Measured(
            text,
            density=float(np.mean(densities)),
            loss=float(found.mean()),
            rise=float(rises.mean()),
            error=float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None,
            copies=float(rises[far].mean()) if far.any() else None,
        )


def table(found: Sequence[Measured]) -> Table:
    """Builds the table of all measurements."""
    names = "density", "loss", "increase", "far copies", "s/step"
    rows = Table("setting", *(Column(name, justify="right") for name in names))
    for one in found:
        rows.add_row(
            one.text,
            f"{one.density:.1%}",
            f"{one.loss:.4f}",
            f"{one.rise:+.4f}" + (f" ± {one.error:.4f}" if one.error else ""),
            "none" if one.copies is None else f"{one.copies:+.4f}",
            "unknown" if one.step_seconds is None else f"{one.step_seconds:.2f}",
        )
    return rows
