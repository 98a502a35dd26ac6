"""Times ring attention on the GPUs of a host and prints a markdown table per ring.

    python -m benchmarks.ring.attention --gpus 1 2 --out ring.md

Every problem has its own process. The processes trace and compile at the same time and then measure
one after another; `--workers 0` does everything in this process. Rows go to ring.json as well.
"""

import argparse
import dataclasses
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import jax

from benchmarks import workers
from benchmarks.kernels.masks import BLOCK
from benchmarks.options import make_parser
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
        _work(args)
        return ""
    problems = plan(args, jax.device_count())
    rows: list[Row] = []

    def save() -> str:
        """Writes the results so far: an aborted run keeps its first rows."""
        text = table.header(args.seed, args.heads, args.kv_heads, args.head_dim)
        text += table.tables(rows)
        if args.out is not None:
            args.out.write_text(text)
            values = [dataclasses.asdict(row) for row in rows]
            args.out.with_suffix(".json").write_text(json.dumps(values, indent=1))
        return text

    def receive(row: Row) -> None:
        rows.append(row)
        log(table.line(row))
        save()

    log(f"{len(problems)} problems on {jax.device_count()} devices")
    if args.workers:
        stop = time.perf_counter() + args.stop_after
        workers.measure(
            [(x.name, _command(args, x)) for x in problems],
            args.workers,
            lambda values: receive(Row.from_json(values)),
            log,
            lambda: time.perf_counter() <= stop,
        )
    else:
        for problem in problems:
            for row in _compiled(args, problem).measure(args.repeats, args.seconds):
                receive(row)
    return save()


def plan(args: argparse.Namespace, devices: int) -> list[Problem]:
    """The problems in the order of the options, without those that need more devices."""
    powers = [n for n in (8, 4, 2) if n <= devices]
    many = [n for n in args.gpus or powers if 1 < n <= devices]
    shape = dict(heads=args.heads, kv_heads=args.kv_heads, dim=args.head_dim, backend=args.backend)
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
                add(table.one_gpu_length(seq_len, gpus), "striped", "flat", 1, 1)
    return problems


def _meshes(ring: str, gpus: int, nodes: list[int]) -> list[int]:
    """Numbers of nodes on which a ring differs from the others."""
    if ring == "flat":
        return [1]
    fitting = [n for n in nodes if gpus % n == 0 and gpus // n > 1]
    return fitting if ring == "gather" else [n for n in fitting if n > 1]


def _compiled(args: argparse.Namespace, problem: Problem) -> Case:
    with ThreadPoolExecutor(8) as pool:
        case = Case(pool, problem, jax.devices(), tuple(args.measures))
        log(f"lowered {problem.name}")
        case.prepare(args.masks, args.seed)
        case.wait()
    log(f"compiled {problem.name}")
    return case


def _work(args: argparse.Namespace) -> None:
    """A worker: compiles one problem, waits for its turn, measures."""
    case = _compiled(args, Problem(**json.loads(args.problem)))
    if workers.my_turn():
        for row in case.measure(args.repeats, args.seconds):
            workers.send(dataclasses.asdict(row))


def _command(args: argparse.Namespace, problem: Problem) -> list[str]:
    options = [f"--problem={json.dumps(dataclasses.asdict(problem))}"]
    for name in ("masks", "seed", "repeats", "seconds", "cpu_devices"):
        options += [f"--{name.replace('_', '-')}={getattr(args, name)}"]
    return workers.command("benchmarks.ring.attention", *options, "--measures", *args.measures)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(
        __doc__,
        "heads",
        "kv-heads",
        "head-dim",
        "backend",
        "repeats",
        "seed",
        "workers",
        "out",
        "problem",
    )
    lengths = [524288, 131072, 262144, 1048576]
    parser.add_argument("--seq-len", type=int, nargs="+", default=lengths, metavar="S")
    parser.add_argument("--gpus", type=int, nargs="+", help="default: 1, 2, 4 and 8, if present")
    parser.add_argument("--layouts", nargs="+", choices=KINDS, default=["striped", "zigzag"])
    parser.add_argument("--rings", nargs="+", choices=RINGS, default=list(RINGS))
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2], help="of the mesh")
    parser.add_argument("--masks", default="ABD", help="letters of A, B and D (dense)")
    parser.add_argument("--measures", nargs="*", choices=MEASURES, default=list(MEASURES))
    parser.add_argument(
        "--longest-dense", type=int, default=524288, metavar="S", help="longest dense problem"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=8.0,
        help="limit per time; slower programs are repeated less often, at least 3 times",
    )
    parser.add_argument(
        "--stop-after",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="start no new measurement after this time",
    )
    parser.add_argument("--cpu-devices", type=int, default=0, help="virtual devices, for a trial")
    parser.add_argument("--quick", action="store_true", help="shortest sequence, few repeats")
    args = parser.parse_args(argv)
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
