"""A call of a Triton kernel, as data, and how a GPU runs it.

A test runs the same calls in Triton's interpreter, or only compiles them.
"""

import dataclasses
from typing import Any

import jax
from jax import Array, lax

from pallas_kernels.triton import device
from pallas_kernels.triton.configs import Config

# Of the compiler. A product and a sum of fp32 become one instruction, as in XLA: what happens where
# nothing is said changes in Triton 3.10. And the assembler is that of JAX's CUDA, which may know no
# version of PTX as new as Triton's own does.
OPTIONS = {"enable_fp_fusion": True, "ptx_version": 87}


@dataclasses.dataclass(frozen=True)
class Call:
    """A kernel and what it is called with; names are those of its parameters.

    Attributes:
        kernel: a function of `triton.jit`.
        arrays: that it reads; None for those that it does not.
        outputs: shapes of the arrays that it writes.
        numbers: that do not change the code.
        constants: that do.
        grid: programs, one, two or three numbers.
        config: warps and stages.
    """

    kernel: Any
    arrays: dict[str, Array | None]
    outputs: dict[str, jax.ShapeDtypeStruct]
    numbers: dict[str, int | float]
    constants: dict[str, int | bool]
    grid: tuple[int, ...]
    config: Config


def run_on_gpu(call: Call, capability: int | None = None) -> dict[str, Array]:
    """The outputs of a call, on the GPU that is compiled for.

    Args:
        call: of which all but the configuration's tile sizes is used here.
        capability: compute capability to write code for, as 80 for 8.0; None for that of the GPU.
    """
    import jax_triton

    absent = {name: None for name, x in call.arrays.items() if x is None}
    names = [name for name in call.arrays if name not in absent]

    # `jax.vmap` runs one entry after another: jax-triton's calls cannot be mapped over.
    @jax.custom_batching.sequential_vmap
    def run(*arrays: Array) -> list[Array]:
        results = jax_triton.triton_call(
            **dict(zip(names, arrays, strict=True)), **absent, **call.numbers, **call.constants,
            kernel=call.kernel, out_type=list(call.outputs.values()), grid=call.grid,
            name=call.kernel.fn.__name__, num_warps=call.config.warps,
            num_stages=call.config.stages, backend_options=OPTIONS,
            compute_capability=capability or device.capability(),
        )  # fmt: skip
        # Where a scan stacks results, XLA may otherwise run a copy of the kernel that writes into
        # the stack beside the one whose results are used.
        return lax.optimization_barrier(results)

    results = run(*(call.arrays[name] for name in names))
    return dict(zip(call.outputs, results, strict=True))
