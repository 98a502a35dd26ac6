"""Times tile sizes of the Triton attention kernels; the best belong in configs.py.

    python benchmarks/tune_triton.py [--kernel ...] [--head-dim ...] [--masks ...] [--as-sm80]

On an A100 the candidates are those for its kind. On a Hopper GPU they are too with --as-sm80, which
runs the code of an A100 there; without it, those of native code. A candidate that needs more shared
memory than there is, or does not run for another reason, has that as its time.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # from a checkout: the script's folder is importable, its parent not
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

import pallas_kernels
from benchmarks import ampere_code
from benchmarks.cases import Shape
from benchmarks.masks import slash_mask
from benchmarks.programs import Ours, random_inputs
from benchmarks.timing import median_ms
from pallas_kernels import DenseIndex
from pallas_kernels.triton import configs, device
from pallas_kernels.triton.configs import Config

HEADS = {128: (16, 2), 64: (14, 2)}
KERNELS = ("forward", "dq", "dkdv")
# Queries x keys of a tile, warps, stages: what spills little for sm_80, and what is usual for
# sm_90.
AMPERE = {
    ("forward", 128): [(128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2)],
    ("dq", 128): [(64, 32, 4, 3), (128, 32, 8, 3), (64, 64, 4, 2), (64, 64, 8, 3)],
    ("dkdv", 128): [(32, 64, 4, 3), (32, 64, 4, 2), (32, 128, 8, 2), (64, 128, 8, 2)],
    ("forward", 64): [(128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3)],
    ("dq", 64): [(64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 2)],
    ("dkdv", 64): [(64, 64, 4, 3), (64, 128, 8, 3), (64, 64, 4, 2)],
}
HOPPER = {
    ("forward", 128): [(128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3)],
    ("dq", 128): [(128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3)],
    ("dkdv", 128): [(64, 128, 8, 3), (64, 128, 8, 2), (64, 64, 4, 3)],
    ("forward", 64): [(128, 128, 8, 3), (128, 64, 4, 3), (128, 64, 8, 3)],
    ("dq", 64): [(128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)],
    ("dkdv", 64): [(64, 128, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)],
}


def main() -> None:
    """Prints one markdown table for each kernel, head dim and mask."""
    args = _parse()
    backend = ampere_code.register() if args.as_sm80 else "triton"
    for kernel, dim, mask in itertools.product(args.kernel, args.head_dim, args.masks):
        _tune(kernel, Shape(args.seq_len, *HEADS[dim], dim), mask, backend, args)


def candidates(kernel: str, dim: int, backend: str) -> list[Config]:
    """Tile sizes to try for a kernel of a backend on the GPU that is compiled for."""
    table = AMPERE if shipped(backend) is configs.AMPERE else HOPPER
    return [Config(*sizes) for sizes in table[kernel, dim]]


def shipped(backend: str) -> dict[int, configs.Configs]:
    """The table of `configs.py` that a backend takes its configurations from."""
    early = backend == ampere_code.NAME or device.before_hopper()
    return configs.AMPERE if early else configs.HOPPER


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


def _tune(
    kernel: str, shape: Shape, mask: str, backend: str, args: argparse.Namespace
) -> None:
    index = DenseIndex(128)
    if mask != "D":
        rng = np.random.default_rng(args.seed)
        pattern = slash_mask(mask, rng, shape.heads, shape.seq_len)
        index = pattern.index(shape.seq_len // 128, 4096)
    q, k, v, dout = random_inputs(
        jax.random.key(args.seed), shape.seq_len, shape.heads, shape.kv_heads, shape.dim
    )
    ours = Ours(backend)
    built = jax.jit(ours.build)(q, k, v, index)
    out, lse = jax.jit(ours.forward)(q, k, v, built)
    delta = jax.jit(functools.partial(pallas_kernels.delta_of, backend=backend))(out, dout)
    problem = q, k, v, dout, lse, delta, *built
    print(f"\n{kernel}, D = {shape.dim}, mask {mask}, S = {shape.seq_len}, {backend}, seed "
          f"{args.seed}\n\n| queries x keys, warps, stages | ms |\n| --- | --- |")
    for config in candidates(kernel, shape.dim, backend):
        name = f"{config.rows} x {config.keys}, {config.warps}, {config.stages}"
        if config == getattr(shipped(backend)[shape.dim], kernel):
            name += " (in configs.py)"
        with with_config(kernel, shape.dim, config, backend):
            lowered = jax.jit(program(kernel)).lower(*problem)
        try:
            compiled = lowered.compile()
            time = f"{median_ms(lambda run=compiled: run(*problem), args.repeats):.2f}"
        except jax.errors.JaxRuntimeError as error:
            time = str(error).splitlines()[0]
        print(f"| {name} | {time} |", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--head-dim", type=int, nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--masks", nargs="+", choices="ABD", default=list("BD"))
    parser.add_argument("--seq-len", type=int, default=131072, metavar="S")
    parser.add_argument("--repeats", type=int, default=10, help="a time is the median of so many")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    parser.add_argument("--as-sm80", action="store_true", help="the code of an A100 on this GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
