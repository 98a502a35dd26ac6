"""Times attention kernels and baselines on one GPU and prints a markdown table.

    python -m benchmarks.kernels.attention --seq-len 131072 --masks A B D F --head-dim 128

The baseline, cuDNN, needs a GPU; `benchmarks.peers` compares with kernels of other projects. Each
shape and kind of mask has its own process. The processes compile at the same time and then measure
one after another.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks import workers
from benchmarks.kernels import attention_table as tables
from benchmarks.kernels import triton_sm80
from benchmarks.kernels.cases import Case
from benchmarks.kernels.errors import Errors, relative_errors
from benchmarks.kernels.programs import ALL_HEADS, HEADS, Attention, random_inputs
from benchmarks.kernels.rows import Row, Shape
from benchmarks.options import BACKENDS, length, make_parser
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
        values = json.loads(args.problem)
        workers.serve(_compile(args, Problem(**values | {"shape": Shape(**values["shape"])})))
        return ""
    on_gpu = jax.default_backend() == "gpu"
    rows: list[Row] = []
    errors: dict[int, Errors] = {}
    notes: list[str] = []

    def save() -> str:
        """Writes the results so far: an aborted run keeps its first rows."""
        text = tables.header(args.seed, args.repeats, notes) + tables.table(rows)
        if errors:
            text += "\n" + tables.error_table(errors, args.error_seq_len)
        if args.out is not None:
            args.out.write_text(text)
        return text

    def receive(values: dict[str, Any]) -> None:
        rows.append(Row.from_json(values))
        log(tables.line(rows[-1]))
        save()

    def note(text: str) -> None:
        notes.append(text)
        log(text)

    problems = _plan(args, on_gpu)
    log(f"{len(problems)} problems")
    for problem in [] if args.workers else problems:
        for values in _compile(args, problem)():
            receive(values)
    jobs = [(x.name, _command(args, x)) for x in problems] if args.workers else []
    workers.measure(jobs, max(args.workers, 1), receive, note)
    for dim in args.head_dim if args.error_seq_len else ():
        shape = Shape(args.error_seq_len, *ALL_HEADS[dim], dim)
        masks = [mask for mask in "DAB" if mask in args.masks]
        kernels = Attention(args.backend)
        errors[dim] = relative_errors(kernels, args.seed + dim, shape, masks, cudnn=on_gpu)
        log(f"errors D={dim}: {errors[dim]}")
    return save()


def _plan(args: argparse.Namespace, on_gpu: bool) -> list[Problem]:
    """The problems, longest first."""
    found = []
    for seq_len in sorted(args.seq_len, reverse=True):
        for shape in (Shape(seq_len, *ALL_HEADS[dim], dim) for dim in args.head_dim):
            if sparse := "".join(m for m in "BA" if m in args.masks):
                found.append(Problem(shape, "slash", sparse))
            if "D" in args.masks and seq_len <= args.longest_dense:
                found += [Problem(shape, kind, "D") for kind in ("dense", "cudnn")[: 1 + on_gpu]]
            if "F" in args.masks:
                found.append(Problem(shape, "blocks", "F"))
    others = [dataclasses.replace(p, also=b) for b in args.also for p in found if p.kind != "cudnn"]
    return found + others


def _compile(args: argparse.Namespace, problem: Problem) -> Callable[[], Iterator[dict[str, Any]]]:
    """Compiles one problem, and returns the function that measures its rows."""
    if problem.also == triton_sm80.NAME:
        triton_sm80.register()
    shape = problem.shape
    case = Case(shape, problem.kind, Attention(problem.also or args.backend))
    log(f"compiled {problem.name}")

    def measure() -> Iterator[dict[str, Any]]:
        key = jax.random.fold_in(jax.random.key(args.seed), shape.seq_len + shape.dim)
        inputs = jax.block_until_ready(random_inputs(key, shape))
        for mask in problem.masks:
            row = case.measure(inputs, mask, shape.rng(mask, args.seed), args.repeats)
            row.who = problem.also or row.who
            yield dataclasses.asdict(row)

    return measure


def _command(args: argparse.Namespace, problem: Problem) -> list[str]:
    options = [f"--problem={json.dumps(dataclasses.asdict(problem))}", f"--seed={args.seed}"]
    options += [f"--backend={args.backend}"] if args.backend else []
    options.append(f"--repeats={args.repeats}")
    return workers.command("benchmarks.kernels.attention", *options)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(
        __doc__, "repeats", "seed", "backend", "workers", "out", "problem", "longest-dense"
    )
    parser.set_defaults(longest_dense=131072)
    parser.add_argument(
        "--seq-len", type=length, nargs="+", default=[32768, 65536, 131072, 524288], metavar="S"
    )
    parser.add_argument("--masks", nargs="+", choices="ABDF", default=list("ABDF"))
    parser.add_argument("--head-dim", type=int, nargs="+", choices=ALL_HEADS, default=list(HEADS))
    parser.add_argument(
        "--error-seq-len", type=length, default=8192, metavar="S",
        help="length of the comparison with fp32; 0 skips it",
    )  # fmt: skip
    parser.add_argument(
        "--also", nargs="+", choices=[*BACKENDS, triton_sm80.NAME], default=[],
        help=f"further backends, in their own rows; {triton_sm80.NAME}: A100 code on this GPU",
    )  # fmt: skip
    args = parser.parse_args(argv)
    lengths = args.seq_len + ([args.error_seq_len] if args.error_seq_len else [])
    if "B" in args.masks and min(lengths) < 4096:
        parser.error("--masks: B needs at least 4096 tokens, for its 3000 columns")
    return args


if __name__ == "__main__":
    print(main())
