"""Lines of runs as paired tables, and intervals of their differences."""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments import arms
from experiments.arms import Line
from mtraining_jax.errors import UserError

DRAWS = 10_000
LONG = 2048  # where a long context begins, by predictions.md

# By (task, length, trained, inferred), then by (seed, number).
Scores = dict[tuple, dict[tuple, float]]


class Losses(NamedTuple):
    """Held-out losses of one trained arm, used with one pattern.

    Attributes:
        seeds: of the runs, ascending.
        means: fp64 [seeds, sequences, buckets], nats.
        counts: [buckets], tokens.
        last: fp64 [seeds, sequences], of the last 64 tokens.
        density: mean.
    """

    seeds: tuple[int, ...]
    means: np.ndarray
    counts: np.ndarray
    last: np.ndarray
    density: float


class Band(NamedTuple):
    """A mean difference with its 95 % interval, and the share of draws on its other side."""

    mean: float
    low: float
    high: float
    p: float


def read(folder: Path) -> list[Line]:
    """All lines of a folder. Of a measurement that is there twice the first one counts.

    Raises:
        UserError: if there are none.
    """
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in arms.read_lines(path)]
    if not lines:
        raise UserError(f"{folder} has no lines in files *.jsonl")
    return lines


def losses_of(
    lines: Iterable[Line], tier: str
) -> tuple[dict[tuple[str, str], Losses], list[tuple[str, str, int]]]:
    """Held-out losses by (trained, inferred), and what has not been measured to its end.

    Returns:
        Of each pair the seeds that have all sequences; and (trained, inferred, seed) of those that
        lack some, which are left out.
    """
    found: dict[tuple[str, str, int], dict[int, Line]] = {}
    for line in lines:
        if line["what"] == "loss" and line["tier"] == tier:
            key = line["trained"], line["inferred"], line["seed"]
            found.setdefault(key, {}).setdefault(line["number"], line)
    numbers = sorted({number for x in found.values() for number in x})
    partial = [key for key, x in found.items() if len(x) < len(numbers)]
    result = {}
    for pair in dict.fromkeys(key[:2] for key in found if key not in partial):
        seeds = sorted(key[2] for key in found if key[:2] == pair and key not in partial)
        table = [[found[*pair, seed][n] for n in numbers] for seed in seeds]
        result[pair] = Losses(
            tuple(seeds),
            np.array([[x["loss_by_position"] for x in row] for row in table]),
            np.array(table[0][0]["tokens_by_position"]),
            np.array([[x["loss_of_last"] for x in row] for row in table]),
            float(np.mean([[x["density"] for x in row] for row in table])),
        )
    return result, partial


def scores_of(lines: Iterable[Line], tier: str, what: str = "score") -> Scores:
    """By (task, length, trained, inferred): scores by (seed, number); or another number."""
    found: Scores = {}
    for line in lines:
        if line["what"] == "task" and line["tier"] == tier:
            key = line["task"], line["length"], line["trained"], line["inferred"]
            found.setdefault(key, {}).setdefault((line["seed"], line["number"]), line[what])
    return found


def band(differences: np.ndarray, draws: int = DRAWS, seed: int = 0) -> Band:
    """Mean of paired differences [seeds, sequences], by a bootstrap over both together.

    p is two-sided: twice the smaller share of draws on either side of zero, at least 2 / draws.
    """
    # How often each is drawn; the mean of a draw is a product of these with the table.
    of_seeds, of_sequences = _drawn(*differences.shape, draws, seed)
    means = np.sum(of_seeds @ differences * of_sequences, axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    other = min(np.mean(means <= 0), np.mean(means >= 0))
    p = float(min(1.0, max(2 * other, 2 / draws)))
    return Band(float(differences.mean()), float(low), float(high), p)


@functools.lru_cache(maxsize=8)
def _drawn(seeds: int, sequences: int, draws: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Shares of seeds [draws, seeds] and of sequences [draws, sequences]."""
    random = np.random.default_rng(seed)
    return tuple(
        random.multinomial(count, np.full(count, 1 / count), draws) / count
        for count in (seeds, sequences)
    )


def paired(a: Losses, b: Losses, what: str = "means") -> np.ndarray:
    """a - b of the seeds that both have: [seeds, sequences, buckets], or without buckets.

    Args:
        a, b: of one tier.
        what: "means" or "last".

    Raises:
        UserError: if they have no seed in common.
    """
    common = [seed for seed in a.seeds if seed in b.seeds]
    if not common:
        raise UserError(f"seeds {a.seeds} and {b.seeds} have none in common")
    one, other = (getattr(x, what)[[x.seeds.index(seed) for seed in common]] for x in (a, b))
    return one - other


def long_mean(losses: Losses, means: np.ndarray) -> np.ndarray:
    """The mean over tokens of the buckets from `LONG` on, [seeds, sequences]."""
    chosen = long_buckets(losses)
    return np.average(means[..., chosen], axis=-1, weights=losses.counts[chosen])


def long_buckets(losses: Losses) -> np.ndarray:
    """Numbers of the buckets from `LONG` on; the last one if there is none."""
    first = min(LONG.bit_length() - 1, len(losses.counts) - 1)
    return np.arange(first, len(losses.counts))
