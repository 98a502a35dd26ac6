"""Times ring attention on the GPUs of a host and prints a markdown table per ring.

    python -m benchmarks.ring.attention --gpus 1 2 --out ring.md

Every problem has its own process. The processes trace and compile at the same time and then measure
one after another; `--workers 0` does everything in this process. Rows go to ring.json as well.
"""

import argparse
import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks import workers
from benchmarks.options import length, make_parser
from benchmarks.ring import table
from benchmarks.ring.cases import MEASURES, Case, Row
from benchmarks.ring.programs import Problem
from benchmarks.timing import log
from mtraining_jax.parallel.layout import KINDS
from mtraining_jax.parallel.ring import RINGS


def main(argv: list[str] | None = None) -> str:
    """Runs the benchmark and returns its markdown."""
    args = _parse(argv)
    workers.share_device()
    if args.cpu_devices:
        os.environ.setdefault("NPROC", str(4 * args.cpu_devices))
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    if args.problem:
        workers.serve(_compile(args, Problem(**json.loads(args.problem))))
        return ""
    problems = plan(args, jax.device_count())
    rows: list[Row] = []

    def save() -> str:
        """Writes the results so far: an aborted run keeps its first rows."""
        text = table.header(args) + table.tables(rows)
        if args.out is not None:
            args.out.write_text(text)
            values = [dataclasses.asdict(row) for row in rows]
            args.out.with_suffix(".json").write_text(json.dumps(values, indent=1))
        return text

    def receive(values: dict[str, Any]) -> None:
        rows.append(Row.from_json(values))
        log(table.line(rows[-1]))
        save()

    log(f"{len(problems)} problems on {jax.device_count()} devices")
    if args.workers:
        jobs = [(x.name, _command(args, x)) for x in problems]
        workers.measure(jobs, args.workers, receive, log)
    else:
        for problem in problems:
            for values in _compile(args, problem)():
                receive(values)
    return save()


def plan(args: argparse.Namespace, devices: int) -> list[Problem]:
    """The problems in the order of the options, without those that need more devices."""
    powers = [n for n in (8, 4, 2) if n <= devices]
    many = [n for n in args.gpus or powers if 1 < n <= devices]
    shape = dict(heads=args.heads, kv_heads=args.kv_heads, dim=args.head_dim, backend=args.backend)
    meshes: list[tuple[int, str, str, int, int]] = []
    for seq_len, gpus in itertools.product(args.seq_len, many):
        for layout, ring in itertools.product(args.layouts, args.rings):
            meshes += [(seq_len, layout, ring, gpus, n) for n in _nodes(ring, gpus, args.nodes)]
        if 1 in (args.gpus or [1]):
            meshes.append((table.one_gpu_length(seq_len, gpus), "striped", "flat", 1, 1))
    kinds = [sparse for sparse in (True, False) if set(args.masks) & set("AB" if sparse else "D")]
    return [
        Problem(*mesh, sparse, **shape)
        for mesh, sparse in itertools.product(dict.fromkeys(meshes), kinds)
        if sparse or mesh[0] <= args.longest_dense
    ]


def _nodes(ring: str, gpus: int, nodes: list[int]) -> list[int]:
    """Numbers of nodes on which a ring differs from the others."""
    if ring == "flat":
        return [1]
    fitting = [n for n in nodes if gpus % n == 0 and gpus // n > 1]
    return fitting if ring == "gather" else [n for n in fitting if n > 1]


def _compile(args: argparse.Namespace, problem: Problem) -> Callable[[], Iterator[dict[str, Any]]]:
    """Compiles one problem, and returns the function that measures its rows."""
    case = Case(problem, jax.devices(), args.measures)
    log(f"compiled {problem.name}")
    return lambda: map(dataclasses.asdict, case.measure(args.masks, args.seed, args.repeats))


def _command(args: argparse.Namespace, problem: Problem) -> list[str]:
    options = [f"--problem={json.dumps(dataclasses.asdict(problem))}"]
    for name in ("masks", "seed", "repeats", "cpu_devices"):
        options += [f"--{name.replace('_', '-')}={getattr(args, name)}"]
    return workers.command("benchmarks.ring.attention", *options, "--measures", *args.measures)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    shared = ("heads", "kv-heads", "head-dim", "backend", "repeats", "seed", "workers", "out")
    parser = make_parser(__doc__, *shared, "problem", "longest-dense")
    parser.set_defaults(longest_dense=524288)
    lengths = [524288, 131072, 262144, 1048576]
    parser.add_argument("--seq-len", type=length, nargs="+", default=lengths, metavar="S")
    parser.add_argument("--gpus", type=int, nargs="+", help="default: 1, 2, 4 and 8, if present")
    parser.add_argument("--layouts", nargs="+", choices=KINDS, default=["striped", "zigzag"])
    parser.add_argument("--rings", nargs="+", choices=RINGS, default=list(RINGS))
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2], help="of the mesh")
    parser.add_argument("--masks", default="ABD", help="letters of A, B and D (dense)")
    parser.add_argument("--measures", nargs="*", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--cpu-devices", type=int, default=0, help="virtual devices, for a trial")
    args = parser.parse_args(argv)
    if not set(args.masks) <= set("ABD"):
        parser.error(f"--masks: {args.masks} has letters other than A, B and D")
    if "B" in args.masks and min(args.seq_len) < 8192:
        parser.error("--masks: B needs at least 8192 tokens, for its 3000 columns on one GPU")
    return args


if __name__ == "__main__":
    print(main())
