"""What the benchmark of groups says: its head, a row for each step, and what was reached."""

import argparse
import statistics
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from benchmarks.report import setting
from benchmarks.step import balance
from benchmarks.step.balance import Setting
from benchmarks.step.group_steps import Found

# What was set before: imbalance of attention, error of a step's time, own cost.
_IMBALANCE, _ERROR, _COST = 1.34, 0.05, 0.015
_COLUMNS = (
    "batch", "data.balance", "density drawn", "computed", "imbalance of attention predicted",
    "measured", "of the step predicted", "measured", "attention of the busiest group, ms predicted",
    "measured", "off", "step, s predicted", "measured", "off", "faster predicted", "measured",
)  # fmt: skip
_FORECAST_COLUMNS = (
    "batch", "data.balance", "density drawn", "imbalance of attention", "of the step",
    "attention of the busiest group, ms", "all else, ms", "step, s", "faster",
)  # fmt: skip
COST_COLUMNS = "batch", "without counting, s", "counting pairs by length, s", "own cost"


def row(
    name: str, how: str, both: Sequence[Found], plain: Sequence[Found], comparable: bool
) -> str:
    """A line of the table.

    Args:
        name: of the batch.
        how: it was dealt.
        both: predicted, measured.
        plain: the same in the order of the data.
        comparable: whether predictions are of the device that was measured.
    """
    forecast, real = both
    off = off_by if comparable else lambda *_: "–"
    ratios = [before.step_ms / after.step_ms for before, after in zip(plain, both, strict=True)]
    return table_line(
        name, how, f"{forecast.density:.4f}", f"{real.density:.4f}", f"{forecast.attention:.2f}",
        f"{real.attention:.2f}", f"{forecast.step:.3f}", f"{real.step:.3f}",
        f"{forecast.attention_ms:.0f}", f"{real.attention_ms:.0f}",
        off(forecast.attention_ms, real.attention_ms), f"{forecast.step_ms / 1e3:.3f}",
        f"{real.step_ms / 1e3:.3f}", off(forecast.step_ms, real.step_ms),
        *(f"{ratio:.2f} x" for ratio in ratios),
    )  # fmt: skip


def forecasts(found: Mapping[str, Sequence[Found]]) -> list[str]:
    """Lines of a table of predictions alone.

    Args:
        found: predicted steps, by the order; the same batches in each.
    """
    lines, plain = table_head(_FORECAST_COLUMNS), found["none"]

    def line(name: str, how: str, step: Found, before: Found) -> str:
        return table_line(
            name, how, f"{step.density:.4f}", f"{step.attention:.2f}", f"{step.step:.3f}",
            f"{step.attention_ms:.0f}", f"{step.rest_ms:.0f}", f"{step.step_ms / 1e3:.3f}",
            f"{before.step_ms / step.step_ms:.2f} x",
        )  # fmt: skip

    for number in range(len(plain)):
        for how, steps in found.items():
            lines.append(line(str(number + 1), how, steps[number], plain[number]))
    for how, steps in found.items():
        lines.append(line("mean", how, Found.mean(steps), Found.mean(plain)))
    return lines


def conclusions(
    found: Mapping[str, Sequence[tuple[Found, Found]]], costs: Sequence[float]
) -> list[str]:
    """What was reached of what was set.

    Args:
        found: predicted and measured steps, by the order.
        costs: time with counting over time without, less 1, of each batch.
    """
    ends = {how: np.mean([real.attention for _, real in pairs]) for how, pairs in found.items()}
    begin = ends.pop("none")
    every = [pair for pairs in found.values() for pair in pairs]
    errors = [real.step_ms / forecast.step_ms - 1 for forecast, real in every]
    worst = max(errors, key=abs)
    rest = [float(np.mean([each[which].rest_ms for each in every])) for which in (0, 1)]
    cost = statistics.mean(costs)
    reached = "; ".join(
        f"{value:.2f} with `{how}`, {_reached(value <= _IMBALANCE)}" for how, value in ends.items()
    )
    return [
        f"- Imbalance of attention as measured, {begin:.2f} in the order of the data (goal at most "
        f"{_IMBALANCE}): {reached}.",
        f"- Time of a step over its prediction, less 1 (goal within {_ERROR:.0%}): "
        f"{np.mean(errors):+.1%} in the mean and {worst:+.1%} at the worst of {len(errors)}, "
        f"{_reached(abs(worst) <= _ERROR)}. A step without its attention takes {rest[1]:.0f} ms, "
        f"and {rest[0]:.0f} were predicted ({off_by(*rest)}).",
        f"- Own cost (goal at most {_COST:.1%} of a step): {cost:+.2%} in the mean of "
        f"{len(costs)} batches, {_reached(cost <= _COST)}.",
    ]


def _reached(yes: bool) -> str:
    return "reached" if yes else "missed"


def off_by(forecast: float, real: float) -> str:
    """Measured over predicted, less 1."""
    return f"{real / forecast - 1:+.1%}"


def table_line(*cells: str) -> str:
    """A row of a markdown table."""
    return "| " + " | ".join(cells) + " |"


def table_head(cells: Sequence[str]) -> list[str]:
    """The first two lines of a markdown table."""
    return [table_line(*cells), "|" + " --- |" * len(cells)]


def is_comparable() -> bool:
    """Whether predictions are of the device that is here."""
    return "H200" in jax.devices()[0].device_kind


def introduction(args: argparse.Namespace, run: Setting) -> list[str]:
    """What stands before the first row: what ran, and how it is to be read."""
    model, kind = run.config.model, jax.devices()[0].device_kind
    lines = [
        f"# Groups one after the other on {kind}",
        "",
        f"{setting()}. {run.config.run.name} with {model.num_layers} layers and a vocabulary of "
        f"{model.vocab_size}, {model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}, "
        f"{model.dtype}, remat {model.remat}, random weights. {run.groups} groups of {run.parts} "
        f"packs of {run.config.data.seq_len} tokens, documents of {args.documents[0]} and "
        f"{args.documents[1]} tokens in the mean, seed {args.seed}; {args.batches} batches that "
        f"begin at an imbalance of attention of {args.start} +- 0.05, as predicted.",
        "",
        "**No two groups ran at once.** Each ran by itself on one device, as the training step of "
        "one group over its packs. A step takes what its slowest group takes; the sum of gradients "
        "over groups is not in it. Each step of a group was timed once, after others of its "
        "program; a group that is the same in two orders ran once. Attention was timed by itself, "
        f"one layer of each pack (median of {args.repeats}) with the drawing of its lists, times "
        "the layers. Pairs are drawn and not chosen: densities as in `benchmarks/balance.py`. "
        f"`{balance.TUNED}`: what shares do to densities is given too, alike in all layers; that "
        "their prediction meets it says nothing about a real model, the times do. Averages had "
        f"seen {balance.WARM} batches before, as drawn.",
        "",
        "Predicted: attention by the table in `mtraining_jax/latency.py` with the densities drawn, "
        "the rest by the dry run. *Off*: measured over predicted, less 1. *Faster*: than `none`.",
    ]
    if not is_comparable():
        lines += [
            "",
            f"Predictions and goals are of an H200 and this is a {kind}: they are not compared.",
        ]
    return [*lines, "", *table_head(_COLUMNS)]
