"""Triton kernels in Triton's interpreter, called from JAX programs on a CPU.

jax-triton calls kernels on GPUs only, and the interpreter expects torch tensors. A kernel call
therefore becomes a host callback, with NumPy arrays that implement the tensor methods used by the
interpreter. It runs the kernels' code, one program after another; memory, warps and instructions
are those of the host.

TRITON_INTERPRET must be 1 before Triton is imported: it determines the result of `triton.jit`.
"""

import threading
from typing import Any

import jax
import ml_dtypes
import numpy as np
from triton import language as tl
from triton.runtime import interpreter

from pallas_kernels.triton.call import Call

InterpreterBuilder = interpreter.InterpreterBuilder
_one_at_a_time = threading.Lock()  # the interpreter has one state


def run_interpreted(call: Call) -> dict[str, jax.Array]:
    """Returns the outputs of a call; entries that a kernel does not write are NaN."""
    given = {name: x for name, x in call.arrays.items() if x is not None}

    def on_host(*arrays: np.ndarray) -> list[np.ndarray]:
        inputs = dict(zip(given, map(np.ascontiguousarray, arrays), strict=True))
        outputs = {name: np.full(x.shape, np.nan, x.dtype) for name, x in call.outputs.items()}
        interpret(call, inputs, outputs)
        return list(outputs.values())

    results = jax.pure_callback(
        on_host, list(call.outputs.values()), *given.values(), vmap_method="sequential"
    )
    return dict(zip(call.outputs, results, strict=True))


def interpret(call: Call, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
    """Runs a call's kernel on host arrays, writing the outputs in place.

    Args:
        call: its kernel, numbers, constants and grid are used.
        inputs: the call's arrays that are not None.
        outputs: all outputs.
    """
    absent = {name: None for name, x in call.arrays.items() if x is None}
    tensors = {name: _Tensor(x) for name, x in (inputs | outputs).items()}
    with _one_at_a_time, np.errstate(all="ignore"):
        call.kernel[call.grid](**tensors, **absent, **call.numbers, **call.constants)


class _Tensor:
    """A NumPy array with the tensor interface of the interpreter: on the host, own storage."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "_Tensor":
        return self

    def cpu(self) -> "_Tensor":
        return self

    def new_empty(self, size: Any, device: str) -> "_Tensor":
        del size, device
        return _Tensor(self.array)

    def set_(self, *storage: Any) -> None:
        del storage

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(n // self.array.itemsize for n in self.array.strides)

    def copy_(self, other: "_Tensor") -> None:
        del other


def _with_bf16() -> None:
    """Adds bf16 arithmetic to the interpreter.

    Triton 3.9 multiplies bf16 matrices as if their bits were integers, and truncates when
    converting to bf16. Products are summed in fp64, as the order in which OpenBLAS sums those of a
    row depends on its place in the matrix.
    """
    builder, bf16 = InterpreterBuilder, np.dtype(ml_dtypes.bfloat16)
    cast = builder.cast_impl

    def cast_impl(self, src, dst_type):
        of, to = src.dtype.scalar, dst_type.scalar
        if (of, to) == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(src.data.view(bf16).astype(np.float32), to)
        if (of, to) == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(src.data.astype(bf16).view(np.uint16), to)
        return cast(self, src, dst_type)

    def create_dot(self, a, b, d, *options):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(x, tl.float32) for x in (a, b))
        total = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot


_with_bf16()
