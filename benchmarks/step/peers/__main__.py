"""Times whole training steps of this library and of what people use, on one GPU.

    python -m benchmarks.step.peers --results steps.jsonl --out steps.md

A step is forward, backward, clipping and AdamW of a model with random weights, on one sequence of
random tokens. Each arm at each length is a worker. First --workers of them compile at the same time
into --cache and exit; then they load what was compiled, as many at a time, and measure one after
another. Lengths of --attempts take a single step, to see whether it fits: after --attempt-seconds
it is abandoned, times the square of the length for arms that allocate as they go; a compiled step
reserves all memory when it starts and is abandoned earlier. Results are added to --results at once.
The same command resumes after an abort and repeats what failed, except for lack of memory; remove
lines to repeat others.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import workers
from benchmarks.options import at_least, make_parser
from benchmarks.report import number, table_head, table_line
from benchmarks.result_file import append_lines, read_lines
from benchmarks.step.peers.arms import ARMS, MODELS
from benchmarks.step.peers.measure import OUT_OF_MEMORY

Row = dict[str, Any]
_COMPILED_SECONDS = 12  # after which a compiled step that runs has all of its memory
_COLUMNS = (
    "tokens", "arm", "density", "step s", "lowest to highest", "tokens per second", "peak GiB",
    "loss of the first step",
)  # fmt: skip
_ABOUT = """\
One sequence of random tokens a step, random weights, gradients clipped to a norm of 1, medians of \
the steps after the first. While a process measures, the others wait. Peak: bytes in use at \
most (torch), or what the compiler reserves for a step with its state (JAX).
"""


def read(path: Path, model: str) -> list[Row]:
    """The last row of each arm and length of a model."""
    rows = [row for row in read_lines(path) if row["model"] == model]
    return list({(row["arm"], row["tokens"], row["attempt"]): row for row in rows}.values())


def plan(
    arms: Sequence[str],
    lengths: Iterable[int],
    attempts: Sequence[int],
    seconds: float,
    done: Iterable[Row],
) -> list[Row]:
    """What is left to measure: shorter lengths first, attempts last, by their time."""
    finished = {
        (row["arm"], row["tokens"], row["attempt"]): row.get("unfinished", math.inf)
        for row in done
        if _counts(row)
    }
    jobs = []
    for tokens in sorted(lengths):
        steps = max(3, min(10, 2**17 // tokens))
        jobs += [dict(arm=x, tokens=tokens, attempt=False, steps=steps) for x in arms]
    tried = [x for x in arms if not ARMS[x].whole_logits]
    jobs += sorted(
        (
            dict(arm=x, tokens=tokens, attempt=True, limit=_limit(x, tokens, attempts, seconds))
            for tokens in sorted(attempts)
            for x in tried
        ),
        key=lambda job: job["limit"],
    )
    return [
        job for job in jobs
        if finished.get((job["arm"], job["tokens"], job["attempt"]), -1) < job.get("limit", 0)
    ]  # fmt: skip


def _limit(arm: str, tokens: int, attempts: Iterable[int], seconds: float) -> float:
    if ARMS[arm].compiled:
        return min(seconds, _COMPILED_SECONDS)
    return seconds * (tokens / min(attempts)) ** 2


def table(model: str, rows: Sequence[Row], notes: Iterable[str] = ()) -> str:
    """Markdown: times, the longest sequences, and where this library is faster."""
    lines = [f"# Whole training steps, {model} with random weights", "", _ABOUT]
    rows = sorted(rows, key=lambda row: (row["tokens"], list(ARMS).index(row["arm"])))
    for device in dict.fromkeys(row["device"] for row in rows if "device" in row):
        here = [row for row in rows if row.get("device") == device]
        about = {x for row in here for x in (row["date"], *row["versions"].split(", "))}
        lines += [f"{device}: {', '.join(sorted(about))}", ""]
    lines += [*table_head(_COLUMNS)]
    lines += [table_line(_cells(row)) for row in rows if not row["attempt"] and _counts(row)]
    if any(row["arm"] == "sparse" for row in rows):
        lines += ["", "**Densities below 1 are replayed, not selected**: see what each arm does."]
    lines += ["", "## Longest sequence", "", *_longest(rows)]
    lines += ["", "## Where mtraining-jax is faster", "", *_comparisons(rows), ""]
    lines += ["## What each arm does", ""]
    for arm in dict.fromkeys(_arms(rows)):
        backends = sorted(
            {row["backend"] for row in rows if row["arm"] == arm and "backend" in row}
        )
        selected = f"; torch selected {', '.join(backends)}" if backends else ""
        lines.append(f"- *{ARMS[arm].title}*: {ARMS[arm].recipe}{selected}.")
    failed = [
        f"{ARMS[row['arm']].title}, {row['tokens']} tokens: {row['error']}"
        for row in rows if not _counts(row)
    ]  # fmt: skip
    return "\n".join([*lines, "", *(f"- {text}" for text in (*failed, *notes))]).rstrip() + "\n"


def _arms(rows: Iterable[Row]) -> list[str]:
    return sorted((row["arm"] for row in rows), key=list(ARMS).index)


def _counts(row: Row) -> bool:
    """Whether a row is a result; other errors are repeated."""
    return row.get("error", OUT_OF_MEMORY).startswith(OUT_OF_MEMORY)


def _cells(row: Row) -> list[str]:
    begin = [str(row["tokens"]), ARMS[row["arm"]].title]
    if "error" in row:
        return [*begin, "–", row["error"], *["–"] * 4]
    seconds, density = row["seconds"], row["density"]
    return [
        *begin, number(density, 3), number(seconds, 3),
        " to ".join(number(x, 3) for x in row["spread"]), f"{row['tokens'] / seconds:,.0f}",
        _gib(row), number(row["losses"][0], 3),
    ]  # fmt: skip


def _gib(row: Row) -> str:
    """Peak; a dash if it is unknown, 0 in rows of earlier versions."""
    return number(row["peak"] / 2**30 if row.get("peak") else None, 1)


def _longest(rows: Sequence[Row]) -> Iterator[str]:
    """What fits, a line for each arm."""
    for arm in dict.fromkeys(_arms(rows)):
        texts = [_fits(row) for row in rows if row["arm"] == arm and _counts(row)]
        if texts and ARMS[arm].whole_logits:
            texts.append("no longer ones tried, since the loss keeps the logits of all tokens")
        if texts:
            yield f"- *{ARMS[arm].title}*: {'; '.join(texts)}."
    used = [row["used"] for row in rows if row["attempt"] and row.get("used")]
    if used:
        yield f"- Before these attempts, all processes together used {max(used) / 2**30:.1f} GiB."


def _fits(row: Row) -> str:
    if "error" in row:
        return f"{row['tokens']} {row['error']}"
    memory = f", {_gib(row)} GiB" if row.get("peak") else ""
    if "unfinished" not in row:
        seconds = f", first step {row['seconds']:.3g} s" if row["attempt"] else ""
        return f"{row['tokens']} fits{seconds}{memory}"
    what = " reserved at its start" if ARMS[row["arm"]].compiled else " so far"
    ran = f"{row['tokens']} still ran after {row['unfinished']:.0f} s"
    return f"{ran}{memory}{what if memory else ''}"


def _comparisons(rows: Sequence[Row]) -> Iterator[str]:
    """A sentence for each arm of this library and each other one."""
    times = {
        arm: {x["tokens"]: x["seconds"] for x in rows if x["arm"] == arm and "spread" in x}
        for arm in ARMS
    }
    for own in (x for x in ARMS if ARMS[x].own):
        for other in (x for x in ARMS if not ARMS[x].own):
            both = sorted(times[own].keys() & times[other].keys())
            if both:
                ratios = [times[other][n] / times[own][n] for n in both]
                yield f"- {ARMS[own].title} against {ARMS[other].title}: {crossing(both, ratios)}."


def crossing(lengths: Sequence[int], ratios: Sequence[float]) -> str:
    """Says from which length on ratios of times exceed 1; lengths ascend.

    Between two lengths, the logarithm of the ratio is linear in that of the length.
    """
    listed = ", ".join(f"{x:.2f} ({n})" for n, x in zip(lengths, ratios, strict=True))
    listed = f"times as fast, by length: {listed}"
    slower = [i for i, x in enumerate(ratios) if x < 1]
    if not slower:
        return f"{listed}; faster at every measured length"
    last = slower[-1]
    if last == len(ratios) - 1:
        return f"{listed}; slower at the longest measured length"
    low, high = (math.log(x) for x in ratios[last : last + 2])
    share = -low / (high - low)
    tokens = lengths[last] * (lengths[last + 1] / lengths[last]) ** share
    return f"{listed}; faster from about {float(f'{tokens:.2g}'):.0f} tokens on (interpolated)"


def main(argv: list[str] | None = None) -> str:
    """Measures what is left and returns the table."""
    args = _parse(argv)
    left = plan(
        args.arms, args.lengths, args.attempts, args.attempt_seconds, read(args.results, args.model)
    )
    notes: list[str] = []
    workers.share_device()
    # The default is 75 % of the GPU. Torch has no limit.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(args.cache.resolve())
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

    def jobs(compiles: bool) -> list[workers.Job]:
        found = []
        for job in left:
            if compiles and not ARMS[job["arm"]].compiled:
                continue
            text = json.dumps(job | {"model": args.model, "compile": compiles})
            name = f"{job['arm']}, {job['tokens']} tokens"
            found.append((name, workers.command("benchmarks.step.peers.measure", text)))
        return found

    def receive(row: Row) -> None:
        append_lines(args.results, [row])
        known = {name: row[name] for name in ("seconds", "unfinished", "error") if name in row}
        print(row["arm"], row["tokens"], known, file=sys.stderr, flush=True)

    at_once = max(args.workers, 1)
    try:
        workers.measure(jobs(True), at_once, receive, [].append, args.seconds)
        workers.measure(jobs(False), at_once, receive, notes.append, args.seconds)
    except KeyboardInterrupt:
        notes.append("interrupted")
    text = table(args.model, read(args.results, args.model), notes)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    return text


def _power_of_two(text: str) -> int:
    """The type of an option with a number of tokens."""
    value = int(text)
    if value < 1024 or value & (value - 1):
        raise argparse.ArgumentTypeError(f"{value} is not a power of two of at least 1024")
    return value


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "workers", "out")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE", help="JSON lines")
    parser.add_argument("--model", choices=MODELS, default="Qwen2.5-1.5B")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="NAME")
    lengths = dict(type=_power_of_two, nargs="*", metavar="S")
    parser.add_argument("--lengths", default=[8192, 32768, 131072], **lengths)
    parser.add_argument("--attempts", default=[262144, 524288], **lengths)
    parser.add_argument("--attempt-seconds", type=at_least(1), default=30, metavar="S")
    parser.add_argument(
        "--seconds", type=at_least(1), default=600, help="of compiling, and of measuring, a worker"
    )
    parser.add_argument(
        "--cache", type=Path, default=Path("/tmp/step-peers"), help="folder of compiled programs"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    print(main())
