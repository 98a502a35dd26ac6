"""Times ring attention on the GPUs of a host and prints a markdown table per ring.

    python -m benchmarks.ring.attention --gpus 1 2 --out ring.md

Every problem has its own process. The processes trace and compile at the same time and then measure
one after another. `--workers 0` does everything in this process.
"""

import argparse
import dataclasses
import json
import os
import secrets
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the GPUs
import jax

from benchmarks import workers
from benchmarks.kernels.masks import BLOCK
from benchmarks.ring import table as report
from benchmarks.ring.cases import MEASURES, Cell, Row
from benchmarks.ring.programs import Problem
from mtraining_jax.parallel.layout import KINDS
from mtraining_jax.parallel.ring import RINGS

LONGEST_DENSE = 524288
_START = time.perf_counter()


def main(argv: list[str] | None = None) -> str:
    """Runs the benchmark and returns its markdown."""
    args = _parse(argv)
    if args.cpu_devices:
        os.environ.setdefault("NPROC", str(4 * args.cpu_devices))
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    if args.problem:
        _work(args)
        return ""
    problems = plan(args, jax.device_count())
    rows: list[Row] = []

    def tell(row: Row) -> None:
        rows.append(row)
        _say(report.line(row))
        _save(args, rows)

    _say(f"{len(problems)} problems on {jax.device_count()} devices")
    if args.workers:
        workers.measure(
            "benchmarks.ring.attention", [(x.name, _options(args, x)) for x in problems],
            args.workers,
            lambda values: tell(Row(**values | {"problem": Problem(**values["problem"])})),
            _say, lambda: time.perf_counter() - _START <= args.stop_after,
        )
    else:
        for problem in problems:
            _compiled(args, problem).measure(args.repeats, args.seconds, tell)
    return _save(args, rows)


def plan(args: argparse.Namespace, devices: int) -> list[Problem]:
    """The problems, in the order of the options; those that need more devices are left out."""
    many = [n for n in args.gpus or _powers(devices) if 1 < n <= devices]
    shape = dict(
        heads=args.heads, kv_heads=args.kv_heads, dim=args.head_dim, backend=args.backend
    )
    kinds = [sparse for sparse in (True, False) if set(args.masks) & set("AB" if sparse else "D")]
    problems: list[Problem] = []

    def add(seq_len: int, layout: str, ring: str, gpus: int, nodes: int) -> None:
        for sparse in kinds:
            problem = Problem(seq_len, layout, ring, gpus, nodes, sparse, **shape)
            fits = sparse or seq_len <= args.longest_dense
            if fits and problem not in problems:
                problems.append(problem)

    for seq_len in args.seq_len:
        for gpus in many:
            for layout in args.layouts:
                for ring in args.rings:
                    for nodes in _meshes(ring, gpus, args.nodes):
                        add(seq_len, layout, ring, gpus, nodes)
            if 1 in (args.gpus or [1]):
                add(report.one_gpu_length(seq_len, gpus), "striped", "flat", 1, 1)
    return problems


def _powers(devices: int) -> list[int]:
    return [n for n in (8, 4, 2) if n <= devices]


def _meshes(ring: str, gpus: int, nodes: list[int]) -> list[int]:
    """Numbers of nodes on which a ring differs from the others."""
    if ring == "flat":
        return [1]
    fitting = [n for n in nodes if gpus % n == 0 and gpus // n > 1]
    return fitting if ring == "gather" else [n for n in fitting if n > 1]


def _compiled(args: argparse.Namespace, problem: Problem) -> Cell:
    with ThreadPoolExecutor(8) as pool:
        cell = Cell(pool, problem, jax.devices(), tuple(args.measures))
        _say(f"lowered {problem.name}")
        cell.prepare(args.masks, args.seed)
        cell.wait()
    _say(f"compiled {problem.name}")
    return cell


def _work(args: argparse.Namespace) -> None:
    """A process of its own for one problem: compiles, waits for its turn, measures."""
    cell = _compiled(args, Problem(**json.loads(args.problem)))
    if workers.my_turn():
        cell.measure(
            args.repeats, args.seconds, lambda row: workers.send(dataclasses.asdict(row))
        )


def _options(args: argparse.Namespace, problem: Problem) -> list[str]:
    """Of the worker that does one problem."""
    options = [f"--problem={json.dumps(dataclasses.asdict(problem))}"]
    for name in ("masks", "seed", "repeats", "seconds", "cpu_devices"):
        options += [f"--{name.replace('_', '-')}={getattr(args, name)}"]
    return [*options, "--measures", *args.measures]


def _save(args: argparse.Namespace, rows: list[Row]) -> str:
    """Writes what there is so far: a run that is cut short has its first rows."""
    text = report.header(args.seed, args.heads, args.kv_heads, args.head_dim)
    text += report.tables(rows)
    if args.out is not None:
        args.out.write_text(text)
        rest = [dataclasses.asdict(row) for row in rows]
        args.out.with_suffix(".json").write_text(json.dumps(rest, indent=1))
    return text


def _say(text: str) -> None:
    print(f"[{time.perf_counter() - _START:6.1f} s] {text}", file=sys.stderr, flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seq-len", type=int, nargs="+", default=[524288, 131072, 262144, 1048576], metavar="S"
    )
    parser.add_argument("--gpus", type=int, nargs="+", help="default: 1 and powers of 2 there are")
    parser.add_argument("--layouts", nargs="+", choices=KINDS, default=["striped", "zigzag"])
    parser.add_argument("--rings", nargs="+", choices=RINGS, default=list(RINGS))
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2], help="of the mesh")
    parser.add_argument("--masks", default="ABD", help="letters of A, B and D (dense)")
    parser.add_argument("--measures", nargs="*", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--longest-dense", type=int, default=LONGEST_DENSE, metavar="S")
    parser.add_argument("--repeats", type=int, default=10, help="a time is the median of so many")
    parser.add_argument(
        "--seconds", type=float, default=8.0,
        help="for one time; longer programs are repeated less often, at least 3 times",
    )
    parser.add_argument("--seed", type=int, help="of masks and inputs; default: a fresh one")
    backends = ["xla", "mosaic_gpu", "triton"]
    parser.add_argument("--backend", choices=backends, help="default: the best here")
    parser.add_argument(
        "--workers", type=int, default=max((os.cpu_count() or 2) // 2, 1),
        help="processes that compile at the same time; 0: none",
    )
    parser.add_argument(
        "--stop-after", type=float, default=float("inf"), metavar="SECONDS",
        help="measure nothing new after so long",
    )
    parser.add_argument("--cpu-devices", type=int, default=0, help="virtual devices, for a trial")
    parser.add_argument("--quick", action="store_true", help="shortest sequence, few repeats")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="where tables go as well")
    parser.add_argument("--problem", help=argparse.SUPPRESS)  # of a worker
    args = parser.parse_args(argv)
    args.seed = secrets.randbits(31) if args.seed is None else args.seed
    if args.quick:
        args.seq_len, args.repeats = [min(args.seq_len)], min(args.repeats, 3)
    if not set(args.masks) <= set("ABD"):
        parser.error(f"--masks: {args.masks} has letters other than A, B and D")
    for seq_len in args.seq_len:
        if seq_len % (16 * BLOCK):
            parser.error(f"--seq-len: {seq_len} is not a multiple of {16 * BLOCK}")
    if "B" in args.masks and min(args.seq_len) < 8192:
        parser.error("--masks: B needs at least 8192 tokens, for its 3000 columns on one GPU")
    if args.repeats < 1:
        parser.error(f"--repeats: {args.repeats} is not positive")
    return args


if __name__ == "__main__":
    print(main())
