"""Triton kernel calls as data, run on a GPU or, by tests, interpreted or only compiled."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
from jax import Array, lax

from pallas_kernels.triton import device
from pallas_kernels.triton.configs import Config

type Run = Callable[[Call], dict[str, Array]]  # runs a call on a GPU, or as tests want it

# Compiler options. A product and a sum of fp32 are fused to one instruction, as in XLA; the default
# changes in Triton 3.10. The assembler is that of JAX's CUDA, which may not support PTX versions as
# new as Triton's.
OPTIONS = {"enable_fp_fusion": True, "ptx_version": 87}


@dataclasses.dataclass(frozen=True)
class Call:
    kernel: Any  # a `triton.jit` function
    arrays: Mapping[str, Array | None]  # inputs; None for unused ones
    outputs: dict[str, jax.ShapeDtypeStruct]
    numbers: dict[str, int | float]  # scalars that do not change the code
    constants: dict[str, int | bool]  # compile-time constants
    grid: tuple[int, ...]  # number of programs, in one, two or three dimensions
    config: Config

    @classmethod
    def of(
        cls,
        kernel: Any,
        values: dict[str, Any],
        outputs: dict[str, jax.ShapeDtypeStruct],
        grid: tuple[int, ...],
        config: Config,
    ) -> Self:
        """Selects the arguments of a kernel by name: constants have upper case names."""
        values = values | {"ROWS": config.rows, "KEYS": config.keys}
        values = {name: values[name] for name in kernel.arg_names if name not in outputs}
        constants = {name: x for name, x in values.items() if name.isupper()}
        numbers = {
            name: x
            for name, x in values.items()
            if isinstance(x, int | float) and name not in constants
        }
        arrays = {name: x for name, x in values.items() if name not in constants | numbers}
        return cls(kernel, arrays, outputs, numbers, constants, grid, config)


def run_on_gpu(call: Call, capability: int | None = None) -> dict[str, Array]:
    """Runs a call on the target GPU, compiled for its or another compute capability."""
    import jax_triton  # pyright: ignore[reportMissingImports]

    absent = {name: None for name, x in call.arrays.items() if x is None}
    names = [name for name in call.arrays if name not in absent]

    # `jax.vmap` runs entries one by one: jax-triton's calls cannot be mapped over.
    @jax.custom_batching.sequential_vmap
    def run(*arrays: Array) -> list[Array]:
        results = jax_triton.triton_call(
            **dict(zip(names, arrays, strict=True)),
            **absent,
            **call.numbers,
            **call.constants,
            kernel=call.kernel,
            out_type=list(call.outputs.values()),
            grid=call.grid,
            name=call.kernel.fn.__name__,
            num_warps=call.config.warps,
            num_stages=call.config.stages,
            backend_options=OPTIONS,
            compute_capability=capability or device.capability(),
        )
        # If a scan stacks the results, XLA may otherwise run a copy of the kernel that writes into
        # the stack, in addition to the one that produces the results.
        return lax.optimization_barrier(results)

    results = run(*(call.arrays[name] for name in names))
    return dict(zip(call.outputs, results, strict=True))
