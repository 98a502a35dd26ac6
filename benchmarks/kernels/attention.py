"""Times attention, ours and its peers', and prints one markdown table.

    python -m benchmarks.kernels.attention --seq-len 131072 --masks A B D F --head-dim 128

Peers need a GPU: cuDNN; with torch, its flash attention and FlexAttention; and with --reference
the Triton kernels of MTraining's authors, in a checkout of theirs. A peer that cannot run here is
left out, and the output says why. Every shape and kind of mask has its own process. The processes
compile at the same time and then measure one after another.
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

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory for torch
import jax
import numpy as np

from benchmarks import report, workers
from benchmarks.kernels import triton_sm80 as ampere_code
from benchmarks.kernels.cases import Case, Row, Shape
from benchmarks.kernels.errors import relative_errors
from benchmarks.kernels.masks import BLOCK, Work, block_mask, slash_mask
from benchmarks.kernels.peers.peer import (
    PeerError,
    TorchPeer,
    flash_peer,
    flex_peer,
    reference_peer,
)
from benchmarks.kernels.programs import Ours, random_inputs

HEADS = {128: (16, 2), 64: (14, 2)}  # query and key/value heads by head dim
LONGEST_DENSE = 131072
_START = time.perf_counter()


@dataclasses.dataclass(frozen=True)
class Problem:
    """What one process measures: masks (letters) that share the programs of a shape and kind.

    With `also` it is another backend than the one whose rows are called ours.
    """

    shape: Shape
    kind: str
    masks: str
    also: str | None = None

    @property
    def name(self) -> str:
        """A name for progress lines."""
        name = f"{self.kind} S={self.shape.seq_len} D={self.shape.dim}"
        return f"{name} {self.also}" if self.also else name


def main(argv: list[str] | None = None) -> str:
    """Runs the benchmark and returns its markdown."""
    args = _parse(argv)
    if args.problem:
        _work(args)
        return ""
    on_gpu = jax.default_backend() == "gpu"
    flex_shape = Shape(args.flex_seq_len, *HEADS[128], 128)
    peers = _peers(args, flex_shape) if on_gpu else []
    try:
        return _run(args, on_gpu, flex_shape, peers)
    finally:
        for peer in peers:
            peer.close()


def _peers(args, flex_shape: Shape) -> list[TorchPeer]:
    """Those in torch, which begin to compile."""
    found, shapes = [], [Shape(n, *HEADS[d], d) for n in args.seq_len for d in args.head_dim]
    dense = [shape for shape in shapes if shape.seq_len <= args.longest_dense]
    if "F" in args.masks and flex_shape in shapes:
        mask = block_mask(_rng(args.seed, "F", flex_shape), flex_shape.heads, flex_shape.seq_len)
        found.append(flex_peer(args.torch_python, flex_shape, mask, args.seed, args.repeats))
    if "D" in args.masks and dense:
        found.append(flash_peer(args.torch_python, dense, args.seed, args.repeats))
    problems = [(s, m) for m in "DAB" if m in args.masks for s in (dense if m == "D" else shapes)]
    if args.reference is not None and problems:
        masks = [slash_mask(m, _rng(args.seed, m, s), s.heads, s.seq_len) for s, m in problems]
        found.append(
            reference_peer(
                args.torch_python, args.reference, problems, masks, args.seed, args.repeats
            )
        )
    return found


def _run(args, on_gpu: bool, flex_shape: Shape, peers: list[TorchPeer]) -> str:
    rows: list[Row] = []
    failures = ["no reference (no --reference)"] if on_gpu and args.reference is None else []

    def idle() -> bool:
        """Waits until torch's kernels are compiled: some are tried out on the GPU meanwhile."""
        return all(peer.ready is not None for peer in peers)

    def torch() -> str | None:
        return "; ".join([*(peer.ready[1] for peer in peers), *failures]) or None

    def tell(row: Row) -> None:
        rows.append(row)
        _say(report.line(row))
        _save(args, rows, {}, torch())

    problems = _plan(args, on_gpu, flex_shape)
    _say(f"{len(problems)} problems")
    jobs = [(problem.name, _options(args, problem)) for problem in problems]
    workers.measure(
        "benchmarks.kernels.attention", jobs, args.workers, lambda values: tell(_row(values)),
        _say, idle,
    )
    for peer in peers:
        running, text = peer.ready
        _say(text)
        try:
            for row in peer.measure() if running else ():
                tell(row)
        except PeerError as error:
            failures.append(f"FAILED: {error}")
            _say(failures[-1])
    errors = {}
    for dim in args.head_dim if args.error_seq_len else ():
        masks = tuple(m for m in ("D", "A", "B") if m in args.masks)
        errors[dim] = relative_errors(
            Ours(args.backend), args.seed + dim, args.error_seq_len, *HEADS[dim], dim,
            masks=masks, cudnn=on_gpu,
        )
        _say(f"errors D={dim}: {errors[dim]}")
        _save(args, rows, errors, torch())
    return _save(args, rows, errors, torch())


def _plan(args, on_gpu: bool, flex_shape: Shape) -> list[Problem]:
    """The problems, longest first."""
    found = []
    for seq_len in sorted(args.seq_len, reverse=True):
        for shape in (Shape(seq_len, *HEADS[dim], dim) for dim in args.head_dim):
            if sparse := "".join(m for m in "BA" if m in args.masks):
                found.append(Problem(shape, "slash", sparse))
            if "D" in args.masks and seq_len <= args.longest_dense:
                found += [Problem(shape, kind, "D") for kind in ("dense", "cudnn")[: 1 + on_gpu]]
            if "F" in args.masks and shape == flex_shape:
                found.append(Problem(shape, "blocks", "F"))
    others = [dataclasses.replace(p, also=b) for b in args.also for p in found if p.kind != "cudnn"]
    return found + others


def _work(args) -> None:
    """A process of its own for one problem: compiles, waits for its turn, measures."""
    values = json.loads(args.problem)
    problem = Problem(**values | {"shape": Shape(**values["shape"])})
    shape = problem.shape
    if problem.also == ampere_code.NAME:
        ampere_code.register()
    with ThreadPoolExecutor(8) as pool:
        case = Case(pool, shape, problem.kind, Ours(problem.also or args.backend))
        case.wait()
    _say(f"compiled {problem.name}")
    if not workers.my_turn():
        return
    key = jax.random.fold_in(jax.random.key(args.seed), shape.seq_len + shape.dim)
    inputs = random_inputs(key, shape.seq_len, shape.heads, shape.kv_heads, shape.dim)
    jax.block_until_ready(inputs)
    for mask in problem.masks:
        row = case.measure(inputs, mask, _rng(args.seed, mask, shape), args.repeats)
        row.who = problem.also or row.who
        workers.send(dataclasses.asdict(row))


def _options(args, problem: Problem) -> list[str]:
    """Of the worker that does one problem."""
    options = [f"--problem={json.dumps(dataclasses.asdict(problem))}", f"--seed={args.seed}"]
    options += [f"--backend={args.backend}"] if args.backend else []
    return [*options, f"--repeats={args.repeats}"]


def _row(values: dict) -> Row:
    """What a worker sent."""
    work = values["work"] and Work(**values["work"])
    return Row(**values | {"shape": Shape(**values["shape"]), "work": work})


def _save(args, rows: list[Row], errors: dict, torch: str | None) -> str:
    """Writes what there is so far: a run that is cut short has its first rows."""
    text = report.header(args.seed, args.repeats, torch) + report.table(rows)
    if errors:
        text += "\n" + report.error_table(errors, args.error_seq_len)
    if args.out is not None:
        args.out.write_text(text)
    return text


def _rng(seed: int, mask: str, shape: Shape) -> np.random.Generator:
    return np.random.default_rng([seed, ord(mask), shape.seq_len, shape.dim])


def _say(text: str) -> None:
    print(f"[{time.perf_counter() - _START:6.1f} s] {text}", file=sys.stderr, flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seq-len", type=int, nargs="+", default=[32768, 65536, 131072, 524288], metavar="S"
    )
    parser.add_argument("--masks", nargs="+", choices="ABDF", default=list("ABDF"))
    parser.add_argument("--head-dim", type=int, nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--longest-dense", type=int, default=LONGEST_DENSE, metavar="S")
    parser.add_argument("--flex-seq-len", type=int, default=131072, metavar="S", help="of mask F")
    parser.add_argument(
        "--error-seq-len", type=int, default=8192, metavar="S", help="0 leaves errors out"
    )
    parser.add_argument("--repeats", type=int, default=10, help="a time is the median of so many")
    parser.add_argument("--seed", type=int, help="of masks and inputs; default: a fresh one")
    backends = ["xla", "mosaic_gpu", "triton"]
    parser.add_argument("--backend", choices=backends, help="default: the best here")
    parser.add_argument(
        "--also", nargs="+", choices=[*backends, ampere_code.NAME], default=[],
        help="backends to time in the same run, in rows of their own; triton_sm80: the code of an "
        "A100 on this GPU",
    )
    parser.add_argument(
        "--torch-python", default=sys.executable, metavar="PYTHON",
        help="that has torch; default: this one",
    )
    parser.add_argument(
        "--reference", type=Path, metavar="DIR",
        help="a checkout of microsoft/MInference, branch wenxuan/mtrain, whose kernels are timed",
    )
    parser.add_argument("--quick", action="store_true", help="one short problem of each kind")
    parser.add_argument(
        "--workers", type=int, default=max((os.cpu_count() or 2) // 2, 1),
        help="processes that compile at the same time",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="where the table goes as well")
    parser.add_argument("--problem", help=argparse.SUPPRESS)  # of a worker
    args = parser.parse_args(argv)
    if args.quick:
        args.seq_len, args.flex_seq_len = [min(args.seq_len)], min(args.seq_len)
        args.head_dim, args.repeats = args.head_dim[:1], min(args.repeats, 3)
    args.seed = secrets.randbits(31) if args.seed is None else args.seed
    for name in ("seq_len", "flex_seq_len", "error_seq_len"):
        value = getattr(args, name)
        for length in value if isinstance(value, list) else [value]:
            if length % (16 * BLOCK):
                option = name.replace("_", "-")
                parser.error(f"--{option}: {length} is not a multiple of {16 * BLOCK}")
    lengths = args.seq_len + ([args.error_seq_len] if args.error_seq_len else [])
    if "B" in args.masks and min(lengths) < 4096:
        parser.error("--masks: B needs at least 4096 tokens, for its 3000 columns")
    for name in ("repeats", "workers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: {getattr(args, name)} is not positive")
    return args


if __name__ == "__main__":
    print(main())
