"""Times configurations of attention kernels; the best belong in the backend's configs.py.

    python -m benchmarks.kernels.tune --backend mosaic_gpu [--kernel ...] [--head-dim ...]
    python -m benchmarks.kernels.tune --backend triton

The backend triton_sm80 is the code of an A100 on a later GPU. With MOSAIC_GPU_DUMP_PTXAS=1 the
assembler prints registers and spills of Hopper kernels. Where a configuration does not run, for
instance because it needs too much shared memory, the table gives the error.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import pallas_kernels
from benchmarks.kernels import triton_sm80
from benchmarks.kernels.masks import slash_mask
from benchmarks.kernels.programs import HEADS, Attention, index_of, random_inputs
from benchmarks.kernels.rows import Shape
from benchmarks.options import length, make_parser
from benchmarks.report import Page, setting, table_head, table_line
from benchmarks.timing import median_ms
from pallas_kernels import backends
from pallas_kernels.mosaic_gpu import configs as hopper
from pallas_kernels.mosaic_gpu.backend import MosaicGpu
from pallas_kernels.triton import configs as triton
from pallas_kernels.triton import device

# Matrix products of a kernel over those of a forward pass. `fused` computes all gradients.
KERNELS = {"forward": 1.0, "dq": 1.5, "dkdv": 2.0, "fused": 2.5}
_GRID = {  # kernel: field of its configuration: values to try
    "forward": {"stages": (2, 3, 4), "query_slots": (1, 2), "keys_late": (False, True)},
    "dq": {"stages": (2, 3, 4)},
    "dkdv": {"stages": (2, 3, 4)},
    "fused": {
        "stages": (2, 3), "ds_from_memory": (True, False), "early_shift": (True, False),
        "item_heads": (1, 4), "waves": (True, False),
    },
}  # fmt: skip
# Queries x keys of a tile, warps, stages; candidates with many spills are omitted. Those for sm_80
# with 128 queries (keys in dk/dv) load less from shared memory per product, because Triton then
# gives each warp whole rows instead of a part of the head dim of all rows.
_AMPERE = {
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
_HOPPER = {
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


def shipped(backend: str) -> dict[int, Any]:
    """The configurations by head dim that a backend takes from its `configs.py`."""
    if backend == "mosaic_gpu":
        return hopper.CONFIGS
    return triton.AMPERE if backend == triton_sm80.NAME else triton.table_for(device.capability())


def candidates(kernel: str, dim: int, backend: str) -> list[Any]:
    """Configurations to try for a kernel of a backend on the target GPU."""
    table = shipped(backend)
    if backend == "mosaic_gpu":
        base, grid = getattr(table[dim], kernel), _GRID[kernel]
        return [
            dataclasses.replace(base, **dict(zip(grid, values, strict=True)))
            for values in itertools.product(*grid.values())
        ]
    sizes = (_HOPPER if table is triton.HOPPER else _AMPERE)[kernel, dim]
    return [triton.Config(*each) for each in sizes]


@contextlib.contextmanager
def with_config(kernel: str, dim: int, config: Any, backend: str) -> Iterator[str]:
    """Yields a backend for programs traced within it, with another configuration of a kernel."""
    configs = dataclasses.replace(shipped(backend)[dim], **{kernel: config})
    if backend == "mosaic_gpu":
        tuned = MosaicGpu("tuned", configs=configs, one_backward_kernel=kernel == "fused")
        backends.register(tuned)
        yield tuned.name
    else:
        with mock.patch.dict(shipped(backend), {dim: configs}):
            yield backend


def program(kernel: str) -> Callable[..., Any]:
    """Returns a function that runs one kernel; the compiler drops kernels of unused results."""

    def run(q, k, v, dout, lse, delta, plan, column_kv):
        if kernel == "forward":
            return pallas_kernels.forward(q, k, v, plan, column_kv)
        grads = pallas_kernels.backward(
            q, k, v, dout, lse, delta, plan, column_kv, dq_dtype=q.dtype
        )
        return {"dq": grads.dq, "dkdv": grads._replace(dq=None), "fused": grads}[kernel]

    return run


def main(argv: list[str] | None = None) -> None:
    """Prints one markdown table for each kernel, head dim and mask."""
    parser = make_parser(__doc__, "repeats", "seed", "out")
    parser.add_argument(
        "--backend", choices=["mosaic_gpu", "triton", triton_sm80.NAME], default="mosaic_gpu"
    )
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--head-dim", type=int, nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--masks", nargs="+", choices="ABD", default=list("BD"))
    parser.add_argument("--seq-len", type=length, default=131072, metavar="S")
    args = parser.parse_args(argv)
    if args.backend == triton_sm80.NAME:
        triton_sm80.register()
    page = Page(args.out)
    page.add(
        f"{setting()}, {jax.devices()[0].device_kind}, {args.backend}, S = {args.seq_len}, seed "
        f"{args.seed}, medians of {args.repeats}, TFLOP/s of executed tiles and columns"
    )
    kernels = [x for x in args.kernel if x != "fused" or args.backend == "mosaic_gpu"]
    for kernel, dim, mask in itertools.product(kernels, args.head_dim, args.masks):
        _tune(args, page, kernel, dim, mask)


def _tune(args: argparse.Namespace, page: Page, kernel: str, dim: int, mask: str) -> None:
    shape = Shape(args.seq_len, *HEADS[dim], dim)
    drawn = slash_mask(mask, shape.rng(mask, args.seed), shape.heads, shape.seq_len)
    index = None if mask == "D" else index_of(drawn, drawn.num_blocks, 4096)
    # Those of flat attention, so that weights and gradients have a realistic size.
    lse = jnp.full((1, shape.heads, shape.seq_len), math.log(shape.seq_len), jnp.float32)
    inputs = [*random_inputs(jax.random.key(args.seed), shape), lse, jnp.zeros_like(lse)]
    page.add("", f"{kernel}, D = {dim}, mask {mask}", "")
    page.add(*table_head(("configuration", "ms", "TFLOP/s")))
    times = {}
    for config in candidates(kernel, dim, args.backend):
        name = ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())
        name += " (in configs.py)" * (config == getattr(shipped(args.backend)[dim], kernel))
        try:
            with with_config(kernel, dim, config, args.backend) as backend:
                built = jax.jit(Attention(backend).build)(*inputs[:3], index)
                run = functools.partial(jax.jit(program(kernel)), *inputs, *built)
                times[name] = median_ms(run, args.repeats)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            page.add(table_line((name, str(error).splitlines()[0], "–")))
            continue
        rate = KERNELS[kernel] * drawn.work().flops(dim) / times[name] / 1e9
        page.add(table_line((name, f"{times[name]:.3f}", f"{rate:.0f}")))
    if times:
        page.add("", f"Fastest: {min(times, key=times.__getitem__)}")


if __name__ == "__main__":
    main()
