"""Times tile sizes of the Triton attention kernels; the best belong in configs.py.

    python -m benchmarks.kernels.tune_triton [--kernel ...] [--head-dim ...] [--out FILE.json]

There are candidates for the code of this GPU (native) and, on a later one, for the code of an A100
(sm80). Every kernel, head dim and code has its own process. The processes compile at the same time
and then measure one after another. The table gives the error of a candidate that does not run, for
instance because it needs too much shared memory.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks import workers
from benchmarks.kernels import triton_sm80
from benchmarks.kernels.cases import Shape
from benchmarks.kernels.masks import slash_mask
from benchmarks.kernels.programs import HEADS, Attention, random_inputs
from benchmarks.options import make_parser
from benchmarks.report import table_head, table_line
from benchmarks.timing import log, median_ms
from pallas_kernels.triton import configs, device
from pallas_kernels.triton.configs import Config

KERNELS = ("forward", "dq", "dkdv")
# Matrix products of a pass over those of a forward pass.
_PRODUCTS = {"forward": 1.0, "dq": 1.5, "dkdv": 2.0}
_CAPACITY = 4096  # of columns
# Queries x keys of a tile, warps, stages; candidates with many spills are omitted. Those for sm_80
# with 128 queries (keys in dk/dv) load less from shared memory per product, because Triton then
# gives each warp whole rows instead of a part of the head dim of all rows.
AMPERE = {
    ("forward", 128): [
        (128, 64, 8, 3), (128, 32, 4, 3), (64, 64, 4, 3), (128, 128, 8, 3), (128, 128, 8, 2),
    ],
    ("dq", 128): [
        (64, 32, 4, 3), (128, 32, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3),
    ],
    ("dkdv", 128): [
        (32, 64, 4, 3), (32, 128, 8, 3), (64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 8, 3),
    ],
    ("forward", 64): [(128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3)],
    ("dq", 64): [(64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 2)],
    ("dkdv", 64): [(64, 64, 4, 3), (64, 128, 8, 3), (64, 64, 4, 2)],
}  # fmt: skip
HOPPER = {
    ("forward", 128): [
        (128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2),
    ],
    ("dq", 128): [(128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 2)],
    ("dkdv", 128): [
        (64, 128, 8, 3), (64, 128, 8, 2), (64, 64, 8, 2), (32, 128, 8, 3), (32, 64, 4, 3),
    ],
    ("forward", 64): [(128, 128, 8, 3), (128, 64, 4, 3), (128, 64, 8, 3)],
    ("dq", 64): [(128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)],
    ("dkdv", 64): [(64, 128, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)],
}  # fmt: skip


def main() -> None:
    """Prints one markdown table for each kernel, head dim, code and mask."""
    args = _parse()
    workers.share_device()
    if args.problem:
        _work(args)
        return
    codes = ["native"] if device.before_hopper() else args.code
    problems = list(itertools.product(args.kernel, args.head_dim, codes))
    found: list[dict] = []

    def receive(value: dict) -> None:
        found.append(value)
        if args.out is not None:
            args.out.write_text(json.dumps(found, indent=1))

    jobs = [(" ".join(map(str, x)), _command(args, x)) for x in problems]
    workers.measure(jobs, args.workers, receive, log)
    print(f"{jax.devices()[0].device_kind}, S = {args.seq_len}, seed {args.seed}, medians of "
          f"{args.repeats}, TFLOP/s of executed tiles and columns")  # fmt: skip
    print(table(found))


def table(found: list[dict]) -> str:
    """Markdown of the results of workers, fastest first."""
    lines = []
    for key, rows in itertools.groupby(found, lambda x: (x["kernel"], x["dim"], x["code"])):
        rows = sorted(rows, key=lambda x: (x["mask"], x["ms"] or math.inf))
        lines += [f"\n{key[0]}, D = {key[1]}, {key[2]}\n"]
        lines += table_head(("mask", "queries x keys, warps, stages", "ms", "TFLOP/s"))
        for row in rows:
            name = "{} x {}, {}, {}".format(*row["config"])
            name += " (in configs.py)" * row["shipped"]
            result = row["error"], "–"
            if row["ms"] is not None:
                result = f"{row['ms']:.2f}", f"{row['tflops']:.0f}"
            lines.append(table_line((row["mask"], name, *result)))
    return "\n".join(lines)


def candidates(kernel: str, dim: int, backend: str) -> list[Config]:
    """Tile sizes to try for a kernel of a backend on the target GPU."""
    table = HOPPER if shipped(backend) is configs.HOPPER else AMPERE
    return [Config(*sizes) for sizes in table[kernel, dim]]


def shipped(backend: str) -> dict[int, configs.Configs]:
    """The configurations that a backend takes from `configs.py`."""
    return configs.AMPERE if backend == triton_sm80.NAME else configs.table_for(device.capability())


@contextlib.contextmanager
def with_config(kernel: str, dim: int, config: Config, backend: str) -> Iterator[None]:
    """Programs traced within it run a kernel with another configuration."""
    table = shipped(backend)
    before = table[dim]
    table[dim] = dataclasses.replace(before, **{kernel: config})
    try:
        yield
    finally:
        table[dim] = before


def program(kernel: str) -> Callable[..., Any]:
    """Returns a function that runs one kernel; the compiler drops kernels of unused results."""

    def forward(q, k, v, dout, lse, delta, plan, column_kv):
        return pallas_kernels.forward(q, k, v, plan, column_kv)

    def backward(q, k, v, dout, lse, delta, plan, column_kv):
        grads = pallas_kernels.backward(q, k, v, dout, lse, delta, plan, column_kv)
        return grads.dq if kernel == "dq" else grads[1:]

    return forward if kernel == "forward" else backward


def _work(args: argparse.Namespace) -> None:
    """A worker: compiles all candidates, waits for its turn, measures."""
    kernel, dim, code = json.loads(args.problem)
    backend = triton_sm80.register() if code == "sm80" else "triton"
    shape = Shape(args.seq_len, *HEADS[dim], dim)
    build = jax.jit(Attention(backend).build)
    rng = np.random.default_rng([args.seed, dim])
    masks = {x: slash_mask(x, rng, shape.heads, shape.seq_len) for x in args.masks}
    indices = {
        name: None if name == "D" else mask.index(shape.seq_len // 128, _CAPACITY)
        for name, mask in masks.items()
    }
    row = jax.ShapeDtypeStruct((1, shape.heads, shape.seq_len), jnp.float32)
    q, k, v, dout = shape.abstract()
    with ThreadPoolExecutor(len(AMPERE[kernel, dim]) * len(masks)) as pool:
        builds, tried = {}, []
        for name, index in indices.items():
            builds[name] = build.lower(q, k, v, index)
            problem = q, k, v, dout, row, row, *builds[name].out_info
            for config in candidates(kernel, dim, backend):
                with with_config(kernel, dim, config, backend):
                    lowered = jax.jit(program(kernel)).lower(*problem)
                tried.append((name, config, pool.submit(lowered.compile)))
        builds = {name: pool.submit(lowered.compile) for name, lowered in builds.items()}
    log(f"compiled {kernel} {dim} {code}")
    if not workers.my_turn():
        return
    inputs = random_inputs(jax.random.key(args.seed), *dataclasses.astuple(shape))
    # Those of flat attention, so that weights and gradients have a realistic size.
    lse = jnp.full(row.shape, math.log(shape.seq_len), jnp.float32)
    inputs += [lse, jnp.zeros_like(lse)]
    built = {name: f.result()(*inputs[:3], indices[name]) for name, f in builds.items()}
    best = getattr(shipped(backend)[dim], kernel)
    for name, config, compiled in tried:
        ms = error = tflops = None
        try:
            run = functools.partial(compiled.result(), *inputs, *built[name])
            ms = median_ms(run, args.repeats)
            tflops = _PRODUCTS[kernel] * masks[name].work().flops(dim) / ms / 1e9
        except jax.errors.JaxRuntimeError as failure:
            error = str(failure).splitlines()[0]
        workers.send({
            "kernel": kernel, "dim": dim, "code": code, "mask": name,
            "config": dataclasses.astuple(config), "shipped": config == best, "ms": ms,
            "tflops": tflops, "error": error,
        })  # fmt: skip


def _command(args: argparse.Namespace, problem: tuple) -> list[str]:
    return workers.command(
        "benchmarks.kernels.tune_triton",
        f"--problem={json.dumps(problem)}", f"--seed={args.seed}", f"--seq-len={args.seq_len}",
        f"--repeats={args.repeats}", "--masks", *args.masks,
    )  # fmt: skip


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__, "repeats", "seed", "workers", "out", "problem")
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--head-dim", type=int, nargs="+", choices=HEADS, default=[128])
    parser.add_argument("--masks", nargs="+", choices="ABD", default=list("BD"))
    parser.add_argument(
        "--code",
        nargs="+",
        choices=["native", "sm80"],
        default=["native", "sm80"],
        help="sm80: the code of an A100 on a later GPU",
    )
    parser.add_argument("--seq-len", type=int, default=65536, metavar="S")
    return parser.parse_args()


if __name__ == "__main__":
    main()
