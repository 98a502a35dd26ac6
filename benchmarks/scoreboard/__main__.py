"""Times the attention of JAX packages on one GPU: which one to take for long sequences.

    python -m benchmarks.scoreboard --results scoreboard.jsonl --out scoreboard.md

Each package on each case is a worker. --workers of them import and compile at the same time, then
measure one after another, the packages of a case in a row. What they measure is added to --results
at once, and what fails is a row that says why. The same command resumes after an abort; remove
lines to repeat them.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import workers
from benchmarks.options import at_least, make_parser
from benchmarks.report import number, setting, table_head, table_line
from benchmarks.result_file import append_lines, read_lines
from benchmarks.scoreboard import cases, measure
from benchmarks.scoreboard.cases import CASES, Case
from benchmarks.scoreboard.packages import PACKAGES

Result = dict[str, Any]
Key = tuple[str, str]  # names of case and package
WRONG = 0.03  # norm of an error over that of the exact values; bf16 has a tenth of it
_COLUMNS = (
    "tokens", "mask", "package", "forward ms", "both passes ms", "memory GB",
    "bits repeat: output, gradients", "error: output, worst gradient", "how",
)  # fmt: skip
_YES_NO = {True: "yes", False: "no", None: "–"}
_OFFERS = "package", "versions", "several GPUs", "lists per head", "according to"
_ABOUT = """\
bf16, batch 1, random inputs. documents: of so many tokens each; window: so many keys; lists: so \
many blocks of 128 keys, per head and row of 128 queries, its own and random earlier ones. Times: \
medians of calls as a JAX program makes them, everything that a package computes from lists or \
documents included. Memory: beyond the inputs, of both passes. Bits: of 3 runs. Errors: norm over \
norm, against fp32 in sampled blocks; above {wrong} a row has no times. What packages offer on \
several GPUs and for lists is what their source says, not measured.
"""


def read(path: Path) -> dict[Key, Result]:
    """Results by case and package; each of the file's lines has a part of one."""
    found: dict[Key, Result] = {}
    for row in read_lines(path):
        key = row["problem"], row["kernels"]
        found[key] = found.get(key, {}) | row
    return found


def plan(some: Iterable[Case], packages: Iterable[str], done: dict[Key, Result]) -> list[Key]:
    """What is left: cases with packages that can run here and have a call for the mask."""
    able = [x for x in packages if not PACKAGES[x].missing()]
    return [
        key for case in some for x in able
        if case.mask in PACKAGES[x].calls
        and not {"total", "error"} & done.get(key := (case.name, x), {}).keys()
    ]  # fmt: skip


def table(rows: dict[Key, Result], some: Sequence[Case], packages: Sequence[str]) -> str:
    """Markdown: a line for each package on each case, and one for what each package offers."""
    devices = {row["device"] for row in rows.values() if "device" in row}
    title = f"# Attention of JAX packages on {', '.join(sorted(devices)) or 'no device'}"
    lines = [title, "", f"{setting()}. {_ABOUT.format(wrong=WRONG)}", *table_head(_COLUMNS)]
    for case in some:
        mask = f"{case.mask} {case.size}" if case.size else case.mask
        for name in packages:
            if not PACKAGES[name].missing() or (case.name, name) in rows:
                cells = _cells(case, name, rows.get((case.name, name), {}))
                lines.append(table_line([str(case.seq_len), mask, name, *cells]))
    for name in packages:
        why = PACKAGES[name].missing()
        if why and not any(key[1] == name for key in rows):
            lines.append(table_line(["all", "all", name, *["–"] * 5, why]))
    lines += ["", *table_head(_OFFERS)]
    for name in packages:
        x, known = PACKAGES[name], [row for key, row in rows.items() if key[1] == name]
        versions = {row["versions"] for row in known if "versions" in row}
        found = "; ".join(sorted(versions)) or "–"
        lines.append(table_line([name, found, x.several_gpus, x.lists, x.source]))
    return "\n".join(lines) + "\n"


def _cells(case: Case, name: str, row: Result) -> list[str]:
    how = PACKAGES[name].calls.get(case.mask)
    if how is None:
        return ["–"] * 5 + ["no call for it"]
    errors = [row[x] for x in ("out", "gradients") if x in row]
    wrong = any(not x <= WRONG for x in errors)  # NaN too
    times = [None if wrong else row.get(x) for x in ("forward", "total")]
    bits = [_YES_NO[row.get(x)] for x in ("out_repeats", "gradients_repeat")]
    gigabytes = row["memory"] / 1e9 if "memory" in row else None
    remarks = [how, "wrong results" * wrong, row.get("error", "" if row else "not measured")]
    return [
        *map(number, (*times, gigabytes)), ", ".join(bits),
        ", ".join(f"{x:.1e}" for x in errors) or "–",
        "; ".join(filter(None, remarks)).replace("|", "\\|"),
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> str:
    """Measures what is left and returns the tables."""
    args = _parse(argv)
    left = plan(args.cases, args.packages, read(args.results))
    scratch = {"scratch": str(args.scratch), "seed": args.seed}
    options = dict(repeats=args.repeats, backend=args.backend)
    every = [scratch | options | dict(problem=case, kernels=name) for case, name in left]

    ended = set[Key]()

    def receive(row: Result) -> None:
        append_lines(args.results, [row])
        if "total" in row or "error" in row:
            ended.add((row["problem"], row["kernels"]))
            print(row["problem"], row["kernels"], row.get("error", "measured"), file=sys.stderr)

    def note(text: str) -> None:
        """Records a process that ended without a result."""
        print(text, file=sys.stderr)
        for case, name in left:
            if text.endswith(f": {_job(case, name)}") and (case, name) not in ended:
                why = f"{text.partition(':')[0]}: crashed, or took more than {args.seconds} seconds"
                receive(dict(problem=case, kernels=name, error=why))

    workers.share_device()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of each thread that computes samples
    try:
        _measure(args, every, scratch, receive, note)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    finally:
        shutil.rmtree(args.scratch, ignore_errors=True)
    text = table(read(args.results), args.cases, args.packages)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    return text


def _job(case: str, name: str) -> str:
    return f"{name} {case}"


def _measure(args: Any, every: Sequence[Result], scratch: Result, receive: Any, note: Any) -> None:
    """Inputs first, then every package on every case, in this process if --workers is 0."""
    some = [Case.parse(x) for x in dict.fromkeys(job["problem"] for job in every)]
    alike: dict[tuple, list[Case]] = {}
    for case in some:
        alike.setdefault((case.seq_len, case.heads, case.kv_heads, case.dim), []).append(case)
    if not args.workers:
        for group in alike.values():
            cases.write(group, args.scratch, args.seed)
        for job in every:
            measure.run(job, lambda: True, receive)
        return
    jobs = []
    for group in alike.values():
        inputs = json.dumps(scratch | {"cases": [case.name for case in group]})
        about = f"inputs of {group[0].seq_len} tokens"
        jobs.append((about, workers.command("benchmarks.scoreboard.cases", inputs)))
    for job in every:
        command = workers.command("benchmarks.scoreboard.measure", json.dumps(job))
        jobs.append((_job(job["problem"], job["kernels"]), command))
    workers.measure(jobs, args.workers, receive, note, args.seconds)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "repeats", "seed", "backend", "workers", "out")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE", help="JSON lines")
    parser.add_argument(
        "--cases", type=Case.parse, nargs="+", default=CASES, metavar="C",
        help="such as 32768,16/2,D128,window4096: tokens, heads, head dim, mask",
    )  # fmt: skip
    parser.add_argument(
        "--packages", nargs="+", choices=PACKAGES, default=list(PACKAGES), metavar="NAME"
    )
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/scoreboard"), metavar="DIR")
    parser.add_argument(
        "--seconds", type=at_least(1), default=600, help="of compiling, and of measuring, a worker"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    print(main())
