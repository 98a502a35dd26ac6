"""Times attention kernels and baselines on one GPU and prints a markdown table.

    python -m benchmarks.kernels.attention --seq-len 131072 --masks A B D F --head-dim 128

The baselines need a GPU: cuDNN; the flash attention and FlexAttention of torch, if installed; and
with --reference the Triton kernels of MTraining's authors, in a checkout of theirs. The output
names those that could not run. Each shape and kind of mask has its own process. The processes
compile at the same time and then measure one after another.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from benchmarks import workers
from benchmarks.kernels import attention_table as tables
from benchmarks.kernels import triton_sm80
from benchmarks.kernels.cases import Case, Row, Shape
from benchmarks.kernels.errors import relative_errors
from benchmarks.kernels.masks import BLOCK, Work, block_mask, slash_mask
from benchmarks.kernels.peers.jobs import Peers
from benchmarks.kernels.programs import HEADS, Attention, random_inputs
from benchmarks.options import BACKENDS, make_parser
from benchmarks.timing import log


@dataclasses.dataclass(frozen=True)
class Problem:
    """What one process measures: masks (letters) that share the programs of a shape and kind.

    With `also` it runs that backend, in rows named after it.
    """

    shape: Shape
    kind: str
    masks: str
    also: str | None = None

    @property
    def name(self) -> str:
        """For progress lines."""
        name = f"{self.kind} S={self.shape.seq_len} D={self.shape.dim}"
        return f"{name} {self.also}" if self.also else name


def main(argv: list[str] | None = None) -> str:
    """Runs the benchmark and returns its markdown."""
    args = _parse(argv)
    workers.share_device()
    if args.problem:
        _work(args)
        return ""
    with tempfile.TemporaryDirectory() as folder:
        return _run(args, Path(folder))


def _run(args, folder: Path) -> str:
    on_gpu = jax.default_backend() == "gpu"
    flex_shape = Shape(args.flex_seq_len, *HEADS[128], 128)
    rows: list[Row] = []
    errors: dict[int, dict] = {}
    notes = ["no reference (no --reference)"] if on_gpu and args.reference is None else []

    def save() -> str:
        """Writes the results so far: an aborted run keeps its first rows."""
        text = tables.header(args.seed, args.repeats, notes) + tables.table(rows)
        if errors:
            text += "\n" + tables.error_table(errors, args.error_seq_len)
        if args.out is not None:
            args.out.write_text(text)
        return text

    def receive(values: dict) -> None:
        work = values["work"] and Work(**values["work"])
        rows.append(Row(**values | {"shape": Shape(**values["shape"]), "work": work}))
        log(tables.line(rows[-1]))
        save()

    def note(text: str) -> None:
        notes.append(text)
        log(text)

    problems = _plan(args, on_gpu, flex_shape)
    log(f"{len(problems)} problems")
    jobs = [(x.name, _command(args, x)) for x in problems]
    jobs += _peers(args, folder, flex_shape) if on_gpu else []
    workers.measure(jobs, args.workers, receive, note)
    for dim in args.head_dim if args.error_seq_len else ():
        masks = tuple(m for m in ("D", "A", "B") if m in args.masks)
        errors[dim] = relative_errors(
            Attention(args.backend), args.seed + dim, args.error_seq_len, *HEADS[dim], dim,
            masks=masks, cudnn=on_gpu,
        )  # fmt: skip
        log(f"errors D={dim}: {errors[dim]}")
        save()
    return save()


def _peers(args, folder: Path, flex_shape: Shape) -> list[workers.Job]:
    """The baselines in torch, which have the GPU to themselves when they run last."""
    peers = Peers(args.torch_python, folder, args.seed, args.repeats)
    shapes = [Shape(n, *HEADS[d], d) for n in args.seq_len for d in args.head_dim]
    dense = [shape for shape in shapes if shape.seq_len <= args.longest_dense]
    jobs = []
    if "F" in args.masks and flex_shape in shapes:
        mask = block_mask(_rng(args.seed, "F", flex_shape), flex_shape.heads, flex_shape.seq_len)
        jobs.append(peers.flex(flex_shape, mask))
    if "D" in args.masks and dense:
        jobs.append(peers.flash(dense))
    problems = [(s, m) for m in "DAB" if m in args.masks for s in (dense if m == "D" else shapes)]
    if args.reference is not None and problems:
        masks = [slash_mask(m, _rng(args.seed, m, s), s.heads, s.seq_len) for s, m in problems]
        jobs.append(peers.mtraining(args.reference, problems, masks))
    return jobs


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
    """A worker: compiles one problem, waits for its turn, measures."""
    values = json.loads(args.problem)
    problem = Problem(**values | {"shape": Shape(**values["shape"])})
    shape = problem.shape
    if problem.also == triton_sm80.NAME:
        triton_sm80.register()
    with ThreadPoolExecutor(8) as pool:
        case = Case(pool, shape, problem.kind, Attention(problem.also or args.backend))
        case.wait()
    log(f"compiled {problem.name}")
    if not workers.my_turn():
        return
    key = jax.random.fold_in(jax.random.key(args.seed), shape.seq_len + shape.dim)
    inputs = random_inputs(key, shape.seq_len, shape.heads, shape.kv_heads, shape.dim)
    jax.block_until_ready(inputs)
    for mask in problem.masks:
        row = case.measure(inputs, mask, _rng(args.seed, mask, shape), args.repeats)
        row.who = problem.also or row.who
        workers.send(dataclasses.asdict(row))


def _command(args, problem: Problem) -> list[str]:
    options = [f"--problem={json.dumps(dataclasses.asdict(problem))}", f"--seed={args.seed}"]
    options += [f"--backend={args.backend}"] if args.backend else []
    options.append(f"--repeats={args.repeats}")
    return workers.command("benchmarks.kernels.attention", *options)


def _rng(seed: int, mask: str, shape: Shape) -> np.random.Generator:
    return np.random.default_rng([seed, ord(mask), shape.seq_len, shape.dim])


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "repeats", "seed", "backend", "workers", "out", "problem")
    lengths = [32768, 65536, 131072, 524288]
    parser.add_argument("--seq-len", type=int, nargs="+", default=lengths, metavar="S")
    parser.add_argument("--masks", nargs="+", choices="ABDF", default=list("ABDF"))
    parser.add_argument("--head-dim", type=int, nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument(
        "--longest-dense", type=int, default=131072, metavar="S", help="longest dense problem"
    )
    parser.add_argument("--flex-seq-len", type=int, default=131072, metavar="S", help="of mask F")
    parser.add_argument(
        "--error-seq-len",
        type=int,
        default=8192,
        metavar="S",
        help="length of the comparison with fp32; 0 skips it",
    )
    parser.add_argument(
        "--also",
        nargs="+",
        choices=[*BACKENDS, triton_sm80.NAME],
        default=[],
        help=f"further backends, in their own rows; {triton_sm80.NAME}: A100 code on this GPU",
    )
    parser.add_argument(
        "--torch-python",
        default=sys.executable,
        metavar="PYTHON",
        help="a Python that has torch; default: this one",
    )
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="DIR",
        help="checkout of microsoft/MInference, branch wenxuan/mtrain; times its kernels",
    )
    parser.add_argument("--quick", action="store_true", help="one short problem of each kind")
    args = parser.parse_args(argv)
    if args.quick:
        args.seq_len, args.flex_seq_len = [min(args.seq_len)], min(args.seq_len)
        args.head_dim, args.repeats = args.head_dim[:1], min(args.repeats, 3)
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
