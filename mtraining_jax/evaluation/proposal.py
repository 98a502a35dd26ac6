"""Measures the loss of sparse pattern settings on a text, and proposes one for training."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from mtraining_jax.data.documents import encoded
from mtraining_jax.data.sources.text import TextFiles
from mtraining_jax.evaluation.engine.programs import Programs
from mtraining_jax.evaluation.far_copies import far_copies
from mtraining_jax.evaluation.load import Loaded
from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.patterns import Dense, Settings
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.text import counted


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurement of one setting: its density, and its mean loss over all labels in nats.

    Attributes:
        text: the setting as the user wrote it.
        rise: `loss` minus the loss with dense attention.
        error: standard error of `rise` over sequences; NaN with a single one.
        copies: the rise over far copies only; NaN if the text has none.
    """

    text: str
    density: float
    loss: float
    rise: float
    error: float
    copies: float


def read_sequences(loaded: Loaded, paths: Sequence[str], length: int, count: int) -> np.ndarray:
    """Reads text files, joins them, and splits them into up to `count` sequences: int32 [N, S].

    `paths` are files, folders and patterns, as in data.paths. Raises UserError if the model has no
    tokenizer, a file cannot be read, or the text is too short.
    """
    if loaded.tokenizer is None:
        raise UserError(f"{loaded.source} has no tokenizer; set one with --tokenizer")
    found: list[np.ndarray] = []
    have = 0
    for where, text in TextFiles(paths=tuple(paths)).documents():
        found.append(encoded(text, where, loaded.tokenizer, loaded.tokenizer.eos))
        have += len(found[-1])
        if have >= length * count:
            break
    if have < length:
        raise UserError(f"--text has {have:,} tokens, fewer than one sequence of {length:,}")
    whole = min(have // length, count)
    return np.concatenate(found)[: whole * length].reshape(whole, length).astype(np.int32)


def check_length(loaded: Loaded, settings: Sequence[Settings], length: int) -> None:
    """Checks that a length fits the model's positions, and that no setting would pad it."""
    most = loaded.network.spec.max_position_embeddings
    if length > most:
        raise UserError(
            f"--length {length} is more than the {most} positions of {loaded.source} "
            "(model.max_position_embeddings)"
        )
    for one in settings:
        padded = _with_settings(loaded, one).network.padded_length(length)
        if padded != length:
            raise UserError(
                f"--length {length} would be padded to {padded} with blocks of {one.block_size} "
                f"tokens on {counted(loaded.network.ranks, 'device')}, which changes densities; "
                f"use --length {padded}"
            )


def measure(
    loaded: Loaded,
    sequences: np.ndarray,
    settings: dict[str, Settings],
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Measured]:
    """Runs a model over sequences, int32 [N, S], first dense, then with each setting.

    The selection reads all tokens of a sequence, as in training. `say` is called with the name of
    the next setting. The first result is dense, with a rise of 0.
    """
    far = np.stack([far_copies(tokens) for tokens in sequences])[:, 1:]
    dense = None
    every = {"dense": Dense(next(iter(settings.values())).block_size)} | settings
    for text, one in every.items():
        say(text)
        programs = Programs(_with_settings(loaded, one))
        losses, densities = [], []
        for tokens in sequences:
            labels = np.append(tokens[1:], np.int32(IGNORE_LABEL))
            scores, density = programs.score(tokens, labels, len(tokens))
            losses.append(scores.loss[:-1].astype(np.float64))
            densities.append(density)
        found = np.stack(losses)
        dense = found if dense is None else dense
        rises = found - dense
        yield Measured(
            text,
            float(np.mean(densities)),
            float(found.mean()),
            float(rises.mean()),
            _standard_error(rises.mean(1)),
            float(rises[far].mean()) if far.any() else math.nan,
        )


def proposed(
    measured: Sequence[Measured],
    cost: Callable[[Measured], float],
    most_rise: float,
    most_copies: float,
) -> Measured | None:
    """Returns the setting with the lowest cost within the limits of both rises, or None."""
    within = [
        one
        for one in measured
        if one.rise <= most_rise and (math.isnan(one.copies) or one.copies <= most_copies)
    ]
    return min(within, key=cost, default=None)


def checked_paths(paths: Sequence[str]) -> tuple[str, ...]:
    """Returns paths of text with `~` expanded."""
    return tuple(str(Path(path).expanduser()) for path in paths)


def _with_settings(loaded: Loaded, settings: Settings) -> Loaded:
    attending = dataclasses.replace(loaded.network.attending, settings=settings)
    network = dataclasses.replace(loaded.network, attending=attending)
    return dataclasses.replace(loaded, network=network)


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
