"""Compares the scores of evaluations that answered the same prompts, in folders of `evaluate.py`.

    python -m benchmarks.quality.paired_tasks evaluations/dense evaluations/sparse --out paired.md

Differences are to the first folder, in points, with standard errors over prompts; their mean weighs
tasks equally. p: two-sided, of a test that flips the signs of the differences. The last column is
the true difference that such a comparison finds significant (p < 0.05) four times in five.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.options import make_parser
from benchmarks.report import Page, table_head, table_line
from benchmarks.result_file import read_lines
from mtraining_jax.utils.errors import UserError

_DRAWS = 20_000
_COLUMNS = (
    "tokens", "task", "evaluation", "prompts", "score", "difference", "p", "found with 80 %",
)  # fmt: skip
# Both errors of a two-sided test at 0.05 with a power of 0.8, in standard errors: 1.96 + 0.84.
_POWER = 2.8

# By (length, task), then by number: a score in [0, 1], the prompt's hash and how it was scored.
Scores = dict[tuple[int, str], dict[int, tuple[float, str, str]]]


class Difference(NamedTuple):
    """A mean difference of paired scores in [-1, 1], its standard error and p value."""

    mean: float
    error: float
    p: float


def scores_of(folder: Path) -> Scores:
    """All scores of a folder.

    Raises:
        UserError: if it has none, or those of several models or kinds of attention.
    """
    found: Scores = {}
    runs = set()
    for line in read_lines(folder / "samples.jsonl"):
        if "score" in line:
            runs.add((line["model"], line["attention"]))
            if len(runs) > 1:
                raise UserError(f"{folder} has several models or kinds of attention; give one each")
            of_task = found.setdefault((line["length"], line["task"]), {})
            of_task[line["number"]] = line["score"], line["prompt_hash"], line["how"]
    if not found:
        raise UserError(f"{folder} has no scores in samples.jsonl")
    return found


def pairs(base: Scores, other: Scores, key: tuple[int, str]) -> np.ndarray:
    """Score and base score of the prompts that both answered, [prompts, 2].

    Raises:
        UserError: if a prompt differs, or one answer is given and the other generated.
    """
    mine, theirs = other.get(key, {}), base.get(key, {})
    both = sorted(mine.keys() & theirs.keys())
    for n in both:
        if mine[n][1:] != theirs[n][1:]:
            what = "prompt" if mine[n][1] != theirs[n][1] else "scoring of prompt"
            raise UserError(f"{what} {n} of {key[1]}, {key[0]} tokens, differs")
    return np.array([(mine[n][0], theirs[n][0]) for n in both], np.float64).reshape(-1, 2)


def difference(tasks: Sequence[np.ndarray]) -> Difference:
    """Mean over tasks of the mean difference, from `pairs` of each."""
    gaps = [x[:, 0] - x[:, 1] for x in tasks]
    mean = float(np.mean([gap.mean() for gap in gaps]))
    variances = [gap.var(ddof=1) / len(gap) if len(gap) > 1 else math.nan for gap in gaps]
    random, flipped = np.random.default_rng(0), np.zeros(_DRAWS)
    for gap in gaps:
        flipped += random.choice([-1.0, 1.0], (_DRAWS, len(gap))) @ gap / len(gap) / len(gaps)
    p = float(np.mean(np.abs(flipped) >= abs(mean) - 1e-12))
    return Difference(mean, math.sqrt(sum(variances)) / len(gaps), p)


def rows(folders: Sequence[Path]) -> Iterator[list[str]]:
    """The rows of the table."""
    base, *others = (scores_of(folder) for folder in folders)
    for length in sorted({length for length, _ in base}):
        keys = [key for key in base if key[0] == length]
        if len(keys) > 1:
            keys.append((length, ""))
        for key in keys:
            name = key[1] or f"mean of {len(keys) - 1}"
            first = [base[k] for k in base if k == key or k[0] == length and not key[1]]
            own = np.mean([np.mean([score for score, *_ in x.values()]) for x in first])
            count = sum(map(len, first))
            yield [str(length), name, folders[0].name, str(count), f"{100 * own:.1f}", "", "", ""]
            for folder, other in zip(folders[1:], others, strict=True):
                used = [key] if key[1] else keys[:-1]
                found = [x for k in used if len(x := pairs(base, other, k))]
                if len(found) == len(used):
                    score = 100 * np.mean([x[:, 0].mean() for x in found])
                    gap = difference(found)
                    yield [
                        str(length), name, folder.name, str(sum(map(len, found))), f"{score:.1f}",
                        f"{100 * gap.mean:+.1f} ± {100 * gap.error:.1f}", f"{gap.p:.2f}",
                        f"{100 * _POWER * gap.error:.1f}" if gap.error else "",
                    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = make_parser(__doc__ or "", "out")
    parser.add_argument("folders", type=Path, nargs="+", help="evaluations; the first is the base")
    args = parser.parse_args(argv)
    try:
        lines = [table_line(row) for row in rows(args.folders)]
    except UserError as error:
        parser.error(str(error))
    Page(args.out).add(*table_head(_COLUMNS), *lines)


if __name__ == "__main__":
    main()
