"""Pairs the measurements of arms, and computes intervals of their differences."""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.result_lines import Line, read_lines
from mtraining_jax.utils.errors import UserError

DRAWS = 10_000
LONG = 2048  # "long context" begins at this position, by predictions.md
# Results keep losses from bucket 6 (position 64) on; no table or picture shows earlier ones.
FIRST_BUCKET = 6

# By (task, length, trained, inferred), then by (seed, number).
Scores = dict[tuple, dict[tuple, float]]


class Losses(NamedTuple):
    """Validation losses of one trained arm, evaluated with one pattern."""

    seeds: tuple[int, ...]  # of the runs, ascending
    means: np.ndarray  # fp64 [seeds, sequences, buckets], nats; NaN before `FIRST_BUCKET`
    counts: np.ndarray  # [buckets], tokens; 0 before `FIRST_BUCKET`
    last: np.ndarray  # fp64 [seeds, sequences], loss of the last 64 tokens
    copies: np.ndarray  # fp64 [seeds, sequences], loss of far copies; NaN where not measured
    density: float  # mean


class Band(NamedTuple):
    """A mean difference with its 95 % interval and its two-sided p value."""

    mean: float
    low: float
    high: float
    p: float


def read(folder: Path) -> list[Line]:
    """All lines of a folder. Of a repeated measurement the first one counts.

    Raises:
        UserError: if there are none.
    """
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in read_lines(path)]
    if not lines:
        raise UserError(f"{folder} has no results (*.jsonl)")
    return lines


def losses_of(
    lines: Iterable[Line], tier: str
) -> tuple[dict[tuple[str, str], Losses], list[tuple[str, str, int]]]:
    """Validation losses by (trained, inferred).

    Returns:
        The losses of seeds with all sequences; and (trained, inferred, seed) of incomplete
        measurements, which are skipped.

    Raises:
        UserError: if arms of a seed were measured on different validation sequences.
    """
    found: dict[tuple[str, str, int], dict[int, Line]] = {}
    for line in lines:
        if line["what"] == "loss" and line["tier"] == tier:
            key = line["trained"], line["inferred"], line["seed"]
            found.setdefault(key, {}).setdefault(line["number"], line)
    _check_same_sequences(found)
    numbers = sorted({number for x in found.values() for number in x})
    partial = [key for key, x in found.items() if len(x) < len(numbers)]
    result = {}
    for pair in dict.fromkeys(key[:2] for key in found if key not in partial):
        seeds = sorted(key[2] for key in found if key[:2] == pair and key not in partial)
        table = [[found[*pair, seed][n] for n in numbers] for seed in seeds]
        result[pair] = Losses(
            tuple(seeds),
            np.array([[_from_first(x, "loss_by_position", np.nan) for x in row] for row in table]),
            np.array(_from_first(table[0][0], "tokens_by_position", 0)),
            np.array([[x["loss_of_last"] for x in row] for row in table]),
            np.array([[x.get("loss_of_copies", np.nan) for x in row] for row in table]),
            float(np.mean([[x["density"] for x in row] for row in table])),
        )
    return result, partial


def _check_same_sequences(found: dict[tuple[str, str, int], dict[int, Line]]) -> None:
    of_seed: dict[int, tuple[str, str | None]] = {}
    for (trained, inferred, seed), lines in found.items():
        arm = f"{trained} used with {inferred}"
        for line in lines.values():
            other, expected = of_seed.setdefault(seed, (arm, line.get("held_out")))
            if line.get("held_out") != expected:
                raise UserError(
                    f"seed {seed}: {arm} and {other} were measured on different validation "
                    f"sequences (held_out = {line.get('held_out')} and {expected}), which do not "
                    "pair; keep their results in different folders"
                )


def _from_first(line: Line, name: str, missing: float) -> list[float]:
    """Values of all buckets, with `missing` for those that results do not keep."""
    # Bucket k has 2^k tokens; only the last bucket may have fewer.
    counts = line["tokens_by_position"]
    skipped = counts[0].bit_length() - 1 if len(counts) > 1 else 0
    return [missing] * skipped + line[name]


def scores_of(lines: Iterable[Line], tier: str, what: str = "score") -> Scores:
    """Scores, or another field, by (task, length, trained, inferred) and then (seed, number)."""
    found: Scores = {}
    for line in lines:
        if line["what"] == "task" and line["tier"] == tier:
            key = line["task"], line["length"], line["trained"], line["inferred"]
            found.setdefault(key, {}).setdefault((line["seed"], line["number"]), line.get(what))
    return found


def band(differences: np.ndarray, draws: int = DRAWS, seed: int = 0) -> Band:
    """Mean of paired differences [seeds, sequences], with a bootstrap over both axes.

    p is two-sided: twice the smaller fraction of draws on either side of zero, at least 2 / draws.
    """
    # The mean of a draw is the product of its weights with the table.
    of_seeds, of_sequences = _drawn(*differences.shape, draws, seed)
    means = np.sum(of_seeds @ differences * of_sequences, axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    other = min(np.mean(means <= 0), np.mean(means >= 0))
    p = float(min(1.0, max(2 * other, 2 / draws)))
    return Band(float(differences.mean()), float(low), float(high), p)


@functools.lru_cache(maxsize=8)
def _drawn(seeds: int, sequences: int, draws: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights of seeds [draws, seeds] and of sequences [draws, sequences]."""
    random = np.random.default_rng(seed)
    return tuple(
        random.multinomial(count, np.full(count, 1 / count), draws) / count
        for count in (seeds, sequences)
    )


def paired(a: Losses, b: Losses, what: str = "means") -> np.ndarray:
    """a - b of a field for the seeds that both have: [seeds, sequences], "means" also [buckets].

    Raises:
        UserError: if they have no seed in common.
    """
    common = [seed for seed in a.seeds if seed in b.seeds]
    if not common:
        raise UserError(f"seeds {a.seeds} and {b.seeds} have none in common")
    one, other = (getattr(x, what)[[x.seeds.index(seed) for seed in common]] for x in (a, b))
    return one - other


def long_mean(losses: Losses, means: np.ndarray) -> np.ndarray:
    """Mean over the tokens from position `LONG` on, [seeds, sequences]."""
    selected = long_buckets(losses)
    return np.average(means[..., selected], axis=-1, weights=losses.counts[selected])


def long_buckets(losses: Losses) -> np.ndarray:
    """Buckets from position `LONG` on, or the last bucket of a shorter sequence."""
    first = min(LONG.bit_length() - 1, len(losses.counts) - 1)
    return np.arange(first, len(losses.counts))
