"""Times attention kernels of several projects on the same lists, on one GPU.

    python -m benchmarks.peers --results peers.jsonl --out peers.md

Each kernel on each problem is a worker. --workers of them import and compile at the same time, then
measure one after another, the kernels of a problem in a row. --queued 2 also calls each pass for
two seconds, with the GPU's power and clock. What they measure is added to --results at once. The
same command resumes after an abort; remove lines to repeat them. Next to the table, --out writes a
picture of the rates.
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
from benchmarks.kernels.rows import OWN
from benchmarks.options import at_least, make_parser
from benchmarks.peers.others import PEERS
from benchmarks.peers.picture import draw
from benchmarks.peers.problems import PROBLEMS, Problem
from benchmarks.report import number, table_head, table_line
from benchmarks.result_file import append_lines, read_lines

Result = dict[str, Any]
_MODULES = {"": "problems", OWN: "own"}  # by kernels; those without a name draw the inputs
_COLUMNS = (
    "tokens x batch", "heads, D", "blocks a row", "density", "kernels", "build ms", "fwd ms",
    "bwd ms", "total ms", "fwd / bwd TFLOP/s", "error: out", "worst gradient",
    "bits repeat: fwd, bwd", "memory GB",
)  # fmt: skip
_QUEUED = (
    "tokens x batch", "heads, D", "blocks a row", "kernels", "pass", "ms", "TFLOP/s", "W", "MHz",
    "J a call", "10^6 cycles",
)  # fmt: skip
_ABOUT = """\
bf16, random inputs and lists: in each row of 128 queries its own block and random earlier ones, \
per head. build: from one bit a block to everything that both passes read (for other projects: \
sorted by torch); total: build and both passes. TFLOP/s by 2 products forward and 5 backward over \
computed blocks (dense: half of S x S). Errors against fp32 in sampled blocks: largest, and norm \
over norm. Unmasked kernels compute the blocks on the diagonal in full. Bits: of 3 runs. Memory: \
beyond the inputs, building and one pass each.
"""


def read(path: Path) -> list[Result]:
    """Results per problem, kernels and device; each of the file's lines has a part of one."""
    found: dict[tuple, Result] = {}
    for row in read_lines(path):
        key = row["problem"], row["kernels"], row.get("device")
        found[key] = found.get(key, {}) | row
    return list(found.values())


def plan(
    problems: Iterable[Problem], kernels: Sequence[str], done: Iterable[Result]
) -> list[tuple[Problem, str]]:
    """Workers for what is not finished, inputs first."""
    finished = {(row["problem"], row["kernels"]) for row in done if {"total", "error"} & row.keys()}
    jobs = []
    for problem in problems:
        unfit = [x for x, peer in PEERS.items() if problem.kind not in peer.kinds]
        left = [x for x in kernels if x not in unfit and (problem.name, x) not in finished]
        jobs += [(problem, x) for x in ("", *left) if left]
    return jobs


def table(rows: Sequence[Result], notes: Iterable[str] = ()) -> str:
    """Markdown: a table for each GPU, and why the rest was not measured."""
    lines = ["# Attention kernels on the same lists", "", _ABOUT]
    for device in dict.fromkeys(row["device"] for row in rows if "forward" in row):
        here = [row for row in rows if row.get("device") == device and "forward" in row]
        about = {x for row in here for x in (row["date"], *row["versions"].split(", "))}
        lines += [f"{device}: {', '.join(sorted(about))}", "", *table_head(_COLUMNS)]
        lines += [*(table_line(_cells(row)) for row in here), ""]
        queued = [x for row in here for x in _queued_cells(row)]
        if queued:
            lines += ["Queued calls:", "", *table_head(_QUEUED), *map(table_line, queued), ""]
    failed = [f"{x['problem']} {x['kernels']}: {x['error']}" for x in rows if "error" in x]
    return "\n".join([*lines, *(f"- {text}" for text in (*failed, *notes))]) + "\n"


def _cells(row: Result) -> list[str]:
    flops = _flops(row)
    rates = [f"{flops[x] / row[x] / 1e9:.0f}" if x in row else "–" for x in flops]
    grads = [row[name] for name in ("dq", "dk", "dv") if name in row]
    worst = [max(each) for each in zip(*grads, strict=True)]
    wrong = [", ".join(f"{x:.1e}" for x in each) or "–" for each in (row["out"], worst)]
    bits = [{True: "yes", False: "no"}.get(row.get(f"{x}_repeats"), "–") for x in flops]
    times = [number(row.get(x)) for x in ("build", "forward", "backward", "total")]
    memory = number(row["memory"] / 1e9 if "memory" in row else None)
    return [
        *_shape(row), f"{row['density']:.3f}", row["kernels"], *times, " / ".join(rates), *wrong,
        ", ".join(bits), memory,
    ]  # fmt: skip


def _queued_cells(row: Result) -> Iterable[list[str]]:
    for name, flops in _flops(row).items():
        if f"{name}_queued" in row:
            ms, watts, mhz = row[f"{name}_queued"]
            figures = f"{flops / ms / 1e9:.0f}", f"{watts:.0f}", f"{mhz:.0f}"
            energy, cycles = number(watts * ms / 1e3), number(mhz * ms / 1e3)
            yield [*_shape(row), row["kernels"], name, number(ms), *figures, energy, cycles]


def _shape(row: Result) -> list[str]:
    x = Problem.parse(row["problem"])
    return [f"{x.seq_len} x {x.batch}", f"{x.heads}/{x.kv_heads}, {x.dim}", str(x.listed)]


def _flops(row: Result) -> dict[str, float]:
    return {"forward": row["flops"], "backward": 2.5 * row["flops"]}


def main(argv: list[str] | None = None) -> str:
    """Measures what is left and returns the table."""
    args = _parse(argv)
    jobs, notes = [], list[str]()
    reference = str(args.reference.resolve()) if args.reference else ""
    for problem, name in plan(args.problems, args.kernels, read(args.results)):
        job = dict(problem=problem.name, kernels=name, reference=reference, seed=args.seed)
        job["folder"] = str(args.scratch / problem.name.replace("/", "-"))
        job |= dict(repeats=args.repeats, backend=args.backend, queued=args.queued)
        module = f"benchmarks.peers.{_MODULES.get(name, 'others')}"
        jobs.append((f"{name} {problem.name}", workers.command(module, json.dumps(job))))

    def receive(row: Result) -> None:
        append_lines(args.results, [row])
        if "total" in row or "error" in row:
            print(row["problem"], row["kernels"], row.get("error", "measured"), file=sys.stderr)

    workers.share_device()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of each thread that computes samples
    try:
        workers.measure(jobs, max(args.workers, 1), receive, notes.append, args.seconds)
    except KeyboardInterrupt:
        notes.append("interrupted")
    finally:
        shutil.rmtree(args.scratch, ignore_errors=True)
    rows = read(args.results)
    text = table(rows, notes)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
        draw(rows, args.out.with_suffix(".png"))
    return text


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "repeats", "seed", "backend", "workers", "out")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE", help="JSON lines")
    parser.add_argument(
        "--problems", type=Problem.parse, nargs="+", default=PROBLEMS, metavar="P",
        help="such as 32768x2,16/2,D128,64: tokens x batch, heads, head dim, blocks or dense",
    )  # fmt: skip
    every = [OWN, *PEERS]
    parser.add_argument("--kernels", nargs="+", choices=every, default=every, metavar="NAME")
    parser.add_argument("--reference", type=Path, metavar="DIR", help="checkout with MTraining")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/peers"), metavar="DIR")
    parser.add_argument(
        "--seconds", type=at_least(1), default=600, help="of compiling, and of measuring, a worker"
    )
    parser.add_argument(
        "--queued", type=at_least(1), default=0, metavar="SECONDS", help="also measure power"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    print(main())
