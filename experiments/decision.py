"""Applies the decision rule of predictions.md."""

import numpy as np

from experiments import variants
from experiments.compare import Band, Losses, Scores, band, long_buckets, long_mean, paired

# Limit for "equal" (fraction of the dense loss), minimum gain of dense in context (nats), minimum
# loss of the window (fraction), limit for needles (points), minimum score of dense in a task.
EQUAL, GAIN, WINDOW_LOSS, NEEDLES, LEARNED = 0.005, 0.2, 0.005, 5.0, 90.0
EARLY = 256  # the gain in context is counted from this position
SEEDS_NEEDED = 3


def verdicts(found: dict[tuple[str, str], Losses], scores: Scores) -> list[str]:
    """The verdict for each arm, one line each."""
    dense = found.get(("dense", "dense"))
    if dense is None:
        return ["- No verdict: the dense arm has not been measured."]
    lines, seeds = [], len(dense.means)
    early = min(EARLY.bit_length() - 1, len(dense.counts) - 1)
    gain = float((dense.means[..., early] - dense.means[..., -1]).mean())
    window, loss = found.get(("window", "window")), long_mean(dense, dense.means).mean()
    lost = None if window is None else long_mean(window, paired(window, dense)).mean() / loss
    valid = gain > GAIN and lost is not None and lost > WINDOW_LOSS
    text = "is not measured" if lost is None else f"loses {100 * lost:+.2f} %"
    lines.append(
        f"- {'Valid' if valid else '**Not valid**'}: dense gains {gain:.3f} nats in context "
        f"(required: {GAIN}), the window {text} (required: {100 * WINDOW_LOSS} %)."
    )
    if seeds < SEEDS_NEEDED:
        lines.append(f"- **Not decisive: {seeds} of {SEEDS_NEEDED} required seeds.**")
    telling = {task for task in _asked_of_dense(scores) if _why_dropped(scores, task) is None}
    for arm in variants.SPARSE:
        used_densely = found.get((arm, "dense"))
        if used_densely is None:
            continue
        difference, limits = paired(used_densely, dense), EQUAL * dense.means.mean((0, 1))
        bands = {k: band(difference[..., k]) for k in long_buckets(dense)}
        inside = all(-limits[k] < x.low and x.high < limits[k] for k, x in bands.items())
        outside = any(x.low > limits[k] or x.high < -limits[k] for k, x in bands.items())
        needles = _needle_difference(scores, arm, telling)
        if needles is not None and abs(needles) > NEEDLES:
            inside = False
        word = "equal" if inside else "**unequal**" if outside else "not decided"
        text = f"- `{arm}`: {word}"
        if len(difference) < SEEDS_NEEDED:
            text += f" ({len(difference)} seed(s))"
        if needles is not None:
            text += f", needles {needles:+.1f} points"
        pattern = variants.own_pattern(arm)
        own, other = found.get((arm, pattern)), found.get(("dense", pattern))
        if own is not None and other is not None:
            helped = band(long_mean(own, paired(own, other)))
            better = helped.mean < 0 and helped.p < 0.01
            text += (
                f"; training with the pattern {'helps' if better else 'is not shown to help'} "
                f"inference with it ({cell(helped)}, p {helped.p:.2g})"
            )
        lines.append(text + ".")
    return lines


def _needle_difference(scores: Scores, arm: str, telling: set[tuple]) -> float | None:
    """Mean difference to dense in points, both evaluated with dense attention.

    Counts the tasks (task, length) in `telling` with questions at the end of the prompt.
    """
    differences = []
    for task in telling:
        if task[0] != "needle_any":
            own, dense = scores.get((*task, arm, "dense"), {}), scores[*task, "dense", "dense"]
            differences += [own[key] - dense[key] for key in own if key in dense]
    return 100 * float(np.mean(differences)) if differences else None


def _asked_of_dense(scores: Scores) -> list[tuple]:
    """Each (task, length) that dense was evaluated on; needle_any, the hardest, first."""
    names = {key[:2] for key, own in scores.items() if key[2:] == ("dense", "dense") and own}
    return sorted(names, key=lambda key: (key[0] != "needle_any", key))


def _why_dropped(scores: Scores, task: tuple) -> str | None:
    """The reason why the rule drops a task; None if the task counts."""
    if _level(scores, task) < LEARNED:
        return f"not learned by dense** (below {LEARNED:.0f})."
    window = _difference(scores, task, "window")
    if window is not None and abs(window.mean) <= NEEDLES:
        return "the window is as good.**"
    return None


def _level(scores: Scores, task: tuple) -> float:
    return 100 * float(np.mean(list(scores[*task, "dense", "dense"].values())))


def task_verdicts(scores: Scores) -> list[str]:
    """For each task: why it is dropped, or each arm's difference to dense, evaluated as trained."""
    lines = []
    for task, length in _asked_of_dense(scores):
        text = f"- {task}, {length} tokens: dense {_level(scores, (task, length)):.1f}"
        dropped = _why_dropped(scores, (task, length))
        if dropped:
            lines.append(f"{text}. **Dropped: {dropped}")
            continue
        for arm in variants.SPARSE:
            found = _difference(scores, (task, length), arm)
            if found is not None:
                interval = f"{found.mean:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"
                text += f"; `{arm}` {interval}"
        lines.append(text + ".")
    return lines


def _difference(scores: Scores, task: tuple, arm: str) -> Band | None:
    """Difference of an arm, evaluated as trained, to dense in points; None if not measured."""
    dense = scores.get((*task, "dense", "dense"), {})
    own = scores.get((*task, arm, variants.own_pattern(arm)), {})
    keys = sorted(set(own) & set(dense))
    seeds = sorted({seed for seed, _ in keys})
    both = set(keys)
    numbers = [n for n in sorted({n for _, n in keys}) if all((s, n) in both for s in seeds)]
    if not numbers:
        return None
    table = [[own[seed, n] - dense[seed, n] for n in numbers] for seed in seeds]
    return band(100 * np.array(table))


def cell(found: Band) -> str:
    """Formats a difference and its interval."""
    return f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
