"""Times tile sizes of the Triton attention kernels; the best belong in configs.py.

    python -m benchmarks.kernels.tune_triton [--kernel ...] [--head-dim ...] [--out FILE.json]

Candidates are those for the code of the GPU that is there (native), and on a later one those for
the code of an A100 too (sm80). Every kernel, head dim and code has its own process. The processes
compile at the same time and then measure one after another. A candidate that needs more shared
memory than there is, or does not run for another reason, has that in place of a time.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the GPU
import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks import workers
from benchmarks.kernels import triton_sm80 as ampere_code
from benchmarks.kernels.cases import Shape
from benchmarks.kernels.masks import slash_mask
from benchmarks.kernels.programs import Ours, random_inputs
from benchmarks.timing import median_ms
from pallas_kernels import DenseIndex
from pallas_kernels.triton import configs, device
from pallas_kernels.triton.configs import Config

HEADS = {128: (16, 2), 64: (14, 2)}
KERNELS = ("forward", "dq", "dkdv")
# Products of a pass over those of a forward pass.
_PRODUCTS = {"forward": 1.0, "dq": 1.5, "dkdv": 2.0}
_CAPACITY = 4096  # of columns
_START = time.perf_counter()
# Queries x keys of a tile, warps, stages, without spills that matter. Those for sm_80 with 128
# queries, or keys in dk/dv, load less from shared memory for each product: Triton then gives each
# warp whole rows, and else all of them and a part of the head dim.
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
    if args.problem:
        _work(args)
        return
    codes = ["native"] if device.before_hopper() else args.code
    problems = list(itertools.product(args.kernel, args.head_dim, codes))
    jobs = [(" ".join(map(str, x)), _options(args, x)) for x in problems]
    found: list[dict] = []

    def tell(value: dict) -> None:
        found.append(value)
        if args.out is not None:
            args.out.write_text(json.dumps(found, indent=1))

    workers.measure("benchmarks.kernels.tune_triton", jobs, args.workers, tell, _say)
    print(f"{jax.devices()[0].device_kind}, S = {args.seq_len}, seed {args.seed}, medians of "
          f"{args.repeats}, TFLOP/s of executed tiles and columns")  # fmt: skip
    print(table(found))


def table(found: list[dict]) -> str:
    """Markdown of what workers sent: fastest first."""
    lines = []
    for key, rows in itertools.groupby(found, lambda x: (x["kernel"], x["dim"], x["code"])):
        rows = sorted(rows, key=lambda x: (x["mask"], x["ms"] or math.inf))
        lines.append(f"\n{key[0]}, D = {key[1]}, {key[2]}\n")
        lines.append("| mask | queries x keys, warps, stages | ms | TFLOP/s |")
        lines.append("|" + " --- |" * 4)
        for row in rows:
            name = "{} x {}, {}, {}".format(*row["config"])
            name += " (in configs.py)" * row["shipped"]
            result = f"{row['error']} | –"
            if row["ms"] is not None:
                result = f"{row['ms']:.2f} | {row['tflops']:.0f}"
            lines.append(f"| {row['mask']} | {name} | {result} |")
    return "\n".join(lines)


def candidates(kernel: str, dim: int, backend: str) -> list[Config]:
    """Tile sizes to try for a kernel of a backend on the GPU that is compiled for."""
    table = HOPPER if shipped(backend) is configs.HOPPER else AMPERE
    return [Config(*sizes) for sizes in table[kernel, dim]]


def shipped(backend: str) -> dict[int, configs.Configs]:
    """The table of `configs.py` that a backend takes its configurations from."""
    return configs.AMPERE if backend == ampere_code.NAME else configs.table_for(device.capability())


@contextlib.contextmanager
def with_config(kernel: str, dim: int, config: Config, backend: str) -> Iterator[None]:
    """Within it, programs that are traced run a kernel with another configuration."""
    table = shipped(backend)
    before = table[dim]
    table[dim] = dataclasses.replace(before, **{kernel: config})
    try:
        yield
    finally:
        table[dim] = before


def program(kernel: str) -> Callable[..., Any]:
    """A function of a problem that runs one kernel: the compiler drops those of unused results."""

    def forward(q, k, v, dout, lse, delta, plan, column_kv):
        return pallas_kernels.forward(q, k, v, plan, column_kv)

    def backward(q, k, v, dout, lse, delta, plan, column_kv):
        grads = pallas_kernels.backward(q, k, v, dout, lse, delta, plan, column_kv)
        return grads.dq if kernel == "dq" else grads[1:]

    return forward if kernel == "forward" else backward


def _work(args: argparse.Namespace) -> None:
    """A process of its own: compiles all candidates, waits for its turn, measures."""
    kernel, dim, code = json.loads(args.problem)
    backend = ampere_code.register() if code == "sm80" else "triton"
    shape, ours = Shape(args.seq_len, *HEADS[dim], dim), Ours(backend)
    rng = np.random.default_rng([args.seed, dim])
    masks = {x: slash_mask(x, rng, shape.heads, shape.seq_len) for x in args.masks}
    indices = {x: _index(x, mask, shape.seq_len) for x, mask in masks.items()}
    row = jax.ShapeDtypeStruct((1, shape.heads, shape.seq_len), jnp.float32)
    q, k, v, dout = shape.abstract()
    with ThreadPoolExecutor(len(AMPERE[kernel, dim]) * len(masks)) as pool:
        builds, tried = {}, []
        for name, index in indices.items():
            builds[name] = jax.jit(ours.build).lower(q, k, v, index)
            problem = q, k, v, dout, row, row, *builds[name].out_info
            for config in candidates(kernel, dim, backend):
                with with_config(kernel, dim, config, backend):
                    lowered = jax.jit(program(kernel)).lower(*problem)
                tried.append((name, config, pool.submit(lowered.compile)))
        builds = {name: pool.submit(lowered.compile) for name, lowered in builds.items()}
    _say(f"compiled {kernel} {dim} {code}")
    if not workers.my_turn():
        return
    given = random_inputs(jax.random.key(args.seed), *dataclasses.astuple(shape))
    # As of flat attention: weights and gradients are as large as they really are.
    lse = jnp.full(row.shape, math.log(shape.seq_len), jnp.float32)
    given += [lse, jnp.zeros_like(lse)]
    built = {name: f.result()(*given[:3], indices[name]) for name, f in builds.items()}
    best = getattr(shipped(backend)[dim], kernel)
    for name, config, compiled in tried:
        ms = error = tflops = None
        try:
            run = functools.partial(compiled.result(), *given, *built[name])
            ms = median_ms(run, args.repeats)
            tflops = _PRODUCTS[kernel] * masks[name].work().flops(dim) / ms / 1e9
        except jax.errors.JaxRuntimeError as failure:
            error = str(failure).splitlines()[0]
        workers.send({
            "kernel": kernel, "dim": dim, "code": code, "mask": name,
            "config": dataclasses.astuple(config), "shipped": config == best, "ms": ms,
            "tflops": tflops, "error": error,
        })  # fmt: skip


def _index(name: str, mask: Any, seq_len: int) -> Any:
    return DenseIndex(128) if name == "D" else mask.index(seq_len // 128, _CAPACITY)


def _options(args: argparse.Namespace, problem: tuple) -> list[str]:
    """Of the worker that does one problem."""
    return [
        f"--problem={json.dumps(problem)}", f"--seed={args.seed}", f"--seq-len={args.seq_len}",
        f"--repeats={args.repeats}", "--masks", *args.masks,
    ]  # fmt: skip


def _say(text: str) -> None:
    print(f"[{time.perf_counter() - _START:6.1f} s] {text}", file=sys.stderr, flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--head-dim", type=int, nargs="+", choices=HEADS, default=[128])
    parser.add_argument("--masks", nargs="+", choices="ABD", default=list("BD"))
    parser.add_argument(
        "--code", nargs="+", choices=["native", "sm80"], default=["native", "sm80"],
        help="sm80: the code of an A100 on a later GPU",
    )
    parser.add_argument("--seq-len", type=int, default=65536, metavar="S")
    parser.add_argument("--repeats", type=int, default=10, help="a time is the median of so many")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    parser.add_argument(
        "--workers", type=int, default=max((os.cpu_count() or 2) // 2, 1),
        help="processes that compile at the same time",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where times go as well")
    parser.add_argument("--problem", help=argparse.SUPPRESS)  # of a worker
    return parser.parse_args()


if __name__ == "__main__":
    main()
