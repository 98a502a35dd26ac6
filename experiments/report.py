"""Writes a report of results/*.jsonl: tables (report.md) and plots (PNG).

    python -m experiments.report --results runs/quality/results --out runs/quality/report

Differences to the dense arm are paired by seed and sequence. Intervals are 95 % intervals from a
bootstrap over seeds and sequences. The report includes the verdicts of the rule in predictions.md.
"""

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.options import make_parser
from benchmarks.report import table_head, table_line
from experiments.compare import (
    LONG,
    Losses,
    Scores,
    band,
    long_mean,
    losses_of,
    paired,
    read,
    scores_of,
)
from experiments.decision import EARLY, cell, task_verdicts, verdicts
from experiments.result_lines import Line, count_steps
from experiments.variants import own_pattern
from mtraining_jax.models.label_scores import bucket_names
from mtraining_jax.utils.errors import UserError


def bucket_table(found: dict[tuple[str, str], Losses], as_trained: bool = False) -> list[str]:
    """Table of loss by position minus that of the dense arm with dense attention.

    Models are evaluated as trained, or all with dense attention.
    """
    dense = found.get(("dense", "dense"))
    if dense is None:
        return ["The dense arm is not measured."]
    names = bucket_names(len(dense.counts))
    selected = [k for k in range(len(names)) if 2**k >= min(EARLY, 2 ** (len(names) - 1))]
    rows = [["arm", "seeds", *(f"from {names[k]}" for k in selected), "the last 64"]]
    d, last = dense.means.mean((0, 1)), f"{dense.last.mean():.4f}"
    rows.append(["dense: loss", str(len(dense.seeds)), *(f"{d[k]:.4f}" for k in selected), last])
    for (trained, inferred), losses in found.items():
        if trained == "dense" or inferred != (own_pattern(trained) if as_trained else "dense"):
            continue
        if trained == "start":  # one model for all seeds
            losses = _repeated(losses, dense.seeds)
        by_bucket = paired(losses, dense)
        seeds = "–" if trained == "start" else str(len(by_bucket))
        cells = [cell(band(by_bucket[..., k])) for k in selected]
        rows.append([trained, seeds, *cells, cell(band(paired(losses, dense, "last")))])
    return markdown(rows)


def _repeated(losses: Losses, seeds: tuple[int, ...]) -> Losses:
    names = ("means", "last", "copies")
    repeated = {x: np.repeat(getattr(losses, x)[:1], len(seeds), 0) for x in names}
    return losses._replace(seeds=seeds, **repeated)


def long_table(found: dict[tuple[str, str], Losses]) -> list[str]:
    """Table of each (trained, inferred): loss from position `LONG` on, and minus dense.

    The difference is a mean over seeds with its interval, in nats and percent, and by seed; that of
    far copies follows.
    """
    dense = found.get(("dense", "dense"))
    columns = ["density", "loss", "minus dense", "%", "by seed", "far copies"]
    rows = [["trained", "used with", *columns]]
    for pair, losses in found.items():
        cells = [f"{losses.density:.3f}", f"{long_mean(losses, losses.means).mean():.4f}"]
        rows.append([*pair, *cells, *_against_dense(pair, losses, dense)])
    return markdown(rows)


def _against_dense(pair: tuple[str, str], losses: Losses, dense: Losses | None) -> list[str]:
    trained, _ = pair
    if dense is not None and trained == "start":
        losses = _repeated(losses, dense.seeds)
    # Dense may have been measured for other seeds.
    seeds = [] if dense is None else [seed for seed in losses.seeds if seed in dense.seeds]
    if not seeds or pair == ("dense", "dense"):
        return ["–"] * 4
    difference = long_mean(losses, paired(losses, dense))
    share = difference.mean() / long_mean(dense, dense.means).mean()
    by_seed = zip(seeds, difference.mean(1), strict=True)
    named = "–" if trained == "start" else ", ".join(f"{k}: {x:+.4f}" for k, x in by_seed)
    copies = paired(losses, dense, "copies")
    of_copies = cell(band(copies)) if np.all(np.isfinite(copies)) else "–"
    return [cell(band(difference)), f"{100 * share:+.2f}", named, of_copies]


def task_table(scores: Scores, densities: Scores) -> list[str]:
    """Table of task scores in percent with standard errors, a row for each (trained, inferred)."""
    columns = sorted({key[:2] for key in scores})
    pairs = list(dict.fromkeys(key[2:] for key in scores))
    named = (f"{task} {length}" for task, length in columns)
    rows = [["trained", "used with", "density", *named]]
    for pair in pairs:
        own = [x for key in densities if key[2:] == pair for x in densities[key].values()]
        cells = [f"{np.mean([x for x in own if x is not None]):.3f}"]
        for column in columns:
            values = np.array(list(scores.get((*column, *pair), {}).values()))
            if not values.size:
                cells.append("–")
                continue
            error = values.std(ddof=1) / np.sqrt(values.size) if values.size > 1 else 0.0
            # If all samples have the same score, a standard error of zero would mislead.
            cells.append(f"{100 * values.mean():.1f}" + (f" ± {100 * error:.1f}" if error else ""))
        rows.append([*pair, *cells])
    return markdown(rows)


def training_table(lines: Iterable[Line], tier: str) -> list[str]:
    """Table of steps, loss, step time, density and recall of each training run.

    Step times exclude the first two steps; times and densities of sparse arms exclude dense steps.
    """
    by_run: dict[tuple, list[Line]] = {}
    for line in lines:
        if line["what"] == "train" and line["tier"] == tier:
            by_run.setdefault((line["trained"], line["seed"]), []).append(line)
    rows = [["arm", "seed", "steps", "loss at the end", "s a step", "density at the end", "recall"]]
    for (arm, seed), steps in by_run.items():
        last = steps[-max(1, len(steps) // 10) :]
        own = [x for x in steps if not x.get("dense_step")]
        seconds = [x["step_seconds"] for x in own[2:] if "step_seconds" in x]
        recall = [x["recall"] for x in steps if x.get("recall") is not None]
        density = [x["density"] for x in own[-len(last) :] if x.get("density") is not None]
        rows.append([
            arm, str(seed), str(count_steps(steps)), f"{np.mean([x['loss'] for x in last]):.4f}",
            f"{np.median(seconds):.3f}" if seconds else "–",
            f"{np.mean(density):.3f}" if density else "–",
            f"{recall[-1]:.3f}" if recall else "–",
        ])  # fmt: skip
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table; the first row is its header."""
    return [*table_head(rows[0]), *map(table_line, rows[1:])]


def write(lines: list[Line], out: Path) -> list[Path]:
    """Writes report.md and, if matplotlib is installed, plots; returns the paths."""
    out.mkdir(parents=True, exist_ok=True)
    text, paths = ["# Training with sparse attention", ""], [out / "report.md"]
    about = [x for x in lines if x["what"] == "run"]
    for device, version in sorted({(x["device"], x["jax"]) for x in about}):
        text.append(f"{device}, jax {version}.")
    for tier in dict.fromkeys(x["tier"] for x in lines):
        (found, partial), scores = losses_of(lines, tier), scores_of(lines, tier)
        text += ["", f"## Tier {tier}", "", *training_table(lines, tier)]
        if partial:
            names = ", ".join(f"{own} with {used} (seed {seed})" for own, used, seed in partial)
            text += ["", f"Skipped, because incomplete: {names}."]
        if found:
            text += ["", "Verdicts of the rule in predictions.md:", "", *verdicts(found, scores)]
            text += ["", "Loss minus dense, both with dense attention, nats:", ""]
            text += bucket_table(found)
            text += ["", "Loss of models used as trained, minus dense, nats:", ""]
            text += bucket_table(found, as_trained=True)
            text += ["", f"Mean loss from position {LONG} on, nats:", "", *long_table(found)]
        if scores:
            text += ["", "Tasks, points minus dense, both used as trained:", ""]
            text += task_verdicts(scores)
            densities = scores_of(lines, tier, "density")
            text += ["", "Scores in percent (± standard error over samples):", ""]
            text += task_table(scores, densities)
        if importlib.util.find_spec("matplotlib"):
            from experiments import pictures

            drawn = pictures.draw(tier, found, out), pictures.draw_training(tier, lines, out)
            paths += filter(None, drawn)
    paths[0].write_text("\n".join(text) + "\n")
    return paths


def main(argv: list[str] | None = None) -> None:
    """Writes the report."""
    parser = make_parser(__doc__)
    parser.add_argument("--results", type=Path, default=Path("runs/quality/results"))
    parser.add_argument("--out", type=Path, default=Path("runs/quality/report"))
    args = parser.parse_args(argv)
    try:
        for path in write(read(args.results), args.out):
            print(f"wrote {path}")
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
