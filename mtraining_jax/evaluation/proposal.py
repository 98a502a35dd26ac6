"""What settings of a sparse pattern cost a model on a text, and which of them to train with."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from mtraining_jax.data.documents import encoded
from mtraining_jax.data.loader import IGNORE_LABEL
from mtraining_jax.data.sources.text import TextFiles
from mtraining_jax.errors import UserError
from mtraining_jax.evaluation.far_copies import far_copies
from mtraining_jax.evaluation.load import Loaded
from mtraining_jax.evaluation.programs import Programs
from mtraining_jax.sparsity import Dense, Settings


@dataclasses.dataclass(frozen=True)
class Measured:
    """One setting.

    Attributes:
        text: how it was asked for.
        density: computed over causal pairs, mean over layers, heads and sequences.
        loss: mean over all labels, in nats.
        rise: that, less the loss with dense attention.
        error: standard error of `rise` over sequences; NaN with a single one.
        copies: the rise over far copies alone; NaN if the text has none.
    """

    text: str
    density: float
    loss: float
    rise: float
    error: float
    copies: float


def read_sequences(loaded: Loaded, paths: Sequence[str], length: int, count: int) -> np.ndarray:
    """The first sequences of some text files, joined and cut every `length` tokens.

    Args:
        loaded: the model, of whose tokenizer the tokens are.
        paths: files, folders and patterns, as of data.paths.
        length: S, tokens of a sequence.
        count: sequences at most.

    Returns:
        int32 [N, S], N from 1.

    Raises:
        UserError: if there is no tokenizer, a file cannot be read, or the text is too short.
    """
    if loaded.tokenizer is None:
        raise UserError(f"{loaded.source} has no tokenizer: name one with --tokenizer")
    found: list[np.ndarray] = []
    have = 0
    for where, text in TextFiles(paths=tuple(paths)).documents():
        found.append(encoded(text, where, loaded.tokenizer, loaded.tokenizer.eos))
        have += len(found[-1])
        if have >= length * count:
            break
    if have < length:
        raise UserError(f"--text has {have:,} tokens, less than one sequence of {length:,}")
    whole = min(have // length, count)
    return np.concatenate(found)[: whole * length].reshape(whole, length).astype(np.int32)


def check_length(loaded: Loaded, settings: Sequence[Settings], length: int) -> None:
    """Checks that a model has positions for a length, and that no setting would pad it.

    Raises:
        UserError: naming the length and what is possible.
    """
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
                f"--length {length} would be padded to {padded} for blocks of {one.block_size} "
                f"tokens on {loaded.network.ranks} devices, which changes densities; {padded} "
                "would do"
            )


def measure(
    loaded: Loaded, sequences: np.ndarray, settings: dict[str, Settings],
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Measured]:
    """Runs a model over sequences, dense first, then with each setting in every layer.

    The choice reads all tokens of a sequence, as in training.

    Args:
        loaded: the model.
        sequences: int32 [N, S].
        settings: by how they were asked for.
        say: called with the name of what is measured next.

    Yields:
        The dense model, whose rise is 0, and then each setting.
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
            text, float(np.mean(densities)), float(found.mean()), float(rises.mean()),
            _standard_error(rises.mean(1)), float(rises[far].mean()) if far.any() else math.nan,
        )  # fmt: skip


def proposed(
    measured: Sequence[Measured], cost: Callable[[Measured], float], most_rise: float,
    most_copies: float,
) -> Measured | None:
    """The cheapest setting that loses no more than is allowed.

    Args:
        measured: of `measure`, dense or not.
        cost: what is to be small: the time of a step, or the density.
        most_rise: of the loss on all labels, in nats.
        most_copies: of the loss on far copies, where there are any.

    Returns:
        None if all of them lose more.
    """
    within = [
        one
        for one in measured
        if one.rise <= most_rise and (math.isnan(one.copies) or one.copies <= most_copies)
    ]
    return min(within, key=cost, default=None)


def checked_paths(paths: Sequence[str]) -> tuple[str, ...]:
    """Paths of text with the home folder written out."""
    return tuple(str(Path(path).expanduser()) for path in paths)


def _with_settings(loaded: Loaded, settings: Settings) -> Loaded:
    attending = dataclasses.replace(loaded.network.attending, settings=settings)
    network = dataclasses.replace(loaded.network, attending=attending)
    return dataclasses.replace(loaded, network=network)


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
