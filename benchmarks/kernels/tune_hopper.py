"""Times configurations of the Hopper attention kernels; the best belong in configs.py.

    python -m benchmarks.kernels.tune_hopper [--kernel ...] [--head-dim ...] [--masks ...]

Configurations that need too much shared memory or spill many registers are not timed.
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import pallas_kernels
from benchmarks.kernels import ptxas
from benchmarks.kernels.cases import Shape
from benchmarks.kernels.masks import slash_mask
from benchmarks.kernels.programs import HEADS, Attention, random_inputs
from benchmarks.options import make_parser
from benchmarks.report import table_head, table_line
from benchmarks.timing import median_ms
from pallas_kernels import backends
from pallas_kernels.mosaic_gpu.backend import MosaicGpu
from pallas_kernels.mosaic_gpu.configs import CONFIGS

GRID = {  # kernel: field of its configuration: values to try
    "forward": {"stages": (2, 3, 4), "query_slots": (1, 2), "keys_late": (False, True)},
    "dq": {"stages": (2, 3, 4)},
    "dkdv": {"stages": (2, 3, 4)},
    "fused": {  # one kernel for the gradients of `dq` and `dkdv` together
        "stages": (2, 3),
        "ds_from_memory": (True, False),
        "early_shift": (True, False),
        "item_heads": (1, 4),
        "waves": (True, False),
    },
}
SHIPPED = Attention("mosaic_gpu")


def main() -> None:
    """Prints one markdown table per kernel, head dim and mask."""
    args = _parse()
    for kernel, dim, mask in itertools.product(args.kernel, args.head_dim, args.masks):
        _tune(kernel, Shape(args.seq_len, *HEADS[dim], dim), mask, args)


def _tune(kernel: str, shape: Shape, mask: str, args: argparse.Namespace) -> None:
    index = None
    if mask != "D":
        rng = np.random.default_rng(args.seed)
        index = slash_mask(mask, rng, shape.heads, shape.seq_len).index(shape.seq_len // 128, 4096)
    print(f"\n{kernel}, D = {shape.dim}, mask {mask}, S = {shape.seq_len}, seed {args.seed}\n")
    print(*table_head(("configuration", "registers", "spilled bytes", "ms")), sep="\n")
    problem = _problem(shape, index, args.seed)
    shipped = getattr(CONFIGS[shape.dim], kernel)
    best, best_ms = None, float("inf")
    for config in _configs(kernel, shipped):
        # The plan may depend on the configuration; it is built before anything is timed.
        build = Attention(_backend(kernel, shape.dim, config)).build
        arguments = (*problem, *jax.jit(build)(*problem[:3], index))
        cells, program = _compile(kernel, shape.dim, config, arguments, args.max_spilled)
        if program is not None:
            ms = median_ms(functools.partial(program, *arguments), args.repeats)
            cells[-1] = f"{ms:.3f}"
            if ms < best_ms:
                best, best_ms = config, ms
        name = ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())
        name += " (in configs.py)" * (config == shipped)
        print(table_line([name, *cells]), flush=True)
    if best is not None:
        print(f"\nFastest, {best_ms:.3f} ms: {best}")


def _configs(kernel: str, shipped: Any) -> Iterator[Any]:
    """The shipped configuration with every combination of the grid's values."""
    grid = GRID[kernel]
    for values in itertools.product(*grid.values()):
        yield dataclasses.replace(shipped, **dict(zip(grid, values, strict=True)))


def _compile(
    kernel: str, dim: int, config: Any, problem: tuple, max_spilled: int
) -> tuple[list[str], Any]:
    """Cells for registers, spills and time, and the program; None if it is not to be timed."""
    try:
        lowered = (
            jax.jit(_program(kernel, dim, config))
            .trace(*problem)
            .lower(lowering_platforms=("cuda",))
        )
    except ValueError as error:
        if "shared memory" not in str(error):
            raise
        return ["–", "–", "does not fit in shared memory"], None
    program, usages = ptxas.compiled_with_usage(lowered.compile)
    if len(usages) != 1:
        raise RuntimeError(f"expected one kernel, ptxas reports {len(usages)}")
    usage = usages[0]
    cells = [str(usage.registers), str(usage.spilled), "–"]
    if usage.serialized:
        cells[1] += ", products serialized"
    if usage.spilled > max_spilled:
        return [*cells[:2], "spills too much"], None
    return cells, program


def _program(kernel: str, dim: int, config: Any):
    """Returns a function that runs one kernel; the compiler drops kernels of unused results."""
    backend = _backend(kernel, dim, config)

    def run(q, k, v, dout, lse, delta, plan, column_kv):
        plan = dataclasses.replace(plan, backend=backend)
        if kernel == "forward":
            return pallas_kernels.forward(q, k, v, plan, column_kv)
        grads = pallas_kernels.backward(
            q, k, v, dout, lse, delta, plan, column_kv, dq_dtype=q.dtype
        )
        return {"dq": grads.dq, "dkdv": grads._replace(dq=None), "fused": grads}[kernel]

    return run


def _backend(kernel: str, dim: int, config: Any) -> str:
    """Registers the Hopper backend with a configuration of one kernel, and returns its name."""
    configs = dataclasses.replace(CONFIGS[dim], **{kernel: config})
    tuned = MosaicGpu("tuned", configs=configs, one_backward_kernel=kernel == "fused")
    backends.register(tuned, by_name_only=True)
    return tuned.name


def _problem(shape: Shape, index: Any, seed: int) -> tuple:
    """Random inputs, and lse and delta of the forward pass."""
    key = jax.random.key(seed)
    q, k, v, dout = random_inputs(key, shape.seq_len, shape.heads, shape.kv_heads, shape.dim)
    built = jax.jit(SHIPPED.build)(q, k, v, index)
    out, lse = jax.jit(SHIPPED.forward)(q, k, v, built)
    delta = jax.jit(pallas_kernels.delta_of)(out, dout)
    return q, k, v, dout, lse, delta


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__, "repeats", "seed")
    parser.add_argument("--kernel", nargs="+", choices=GRID, default=list(GRID))
    parser.add_argument("--head-dim", type=int, nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--masks", nargs="+", choices="ABD", default=["B", "D"])
    parser.add_argument("--seq-len", type=int, default=131072, metavar="S")
    parser.add_argument(
        "--max-spilled", type=int, default=256, metavar="BYTES", help="more is not timed"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
