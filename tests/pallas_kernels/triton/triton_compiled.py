"""Compiles kernel calls with Triton and NVIDIA's assembler, on a machine without a GPU."""

import functools
import re
import subprocess
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
from jax import Array
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import pallas_kernels
from pallas_kernels import backends
from pallas_kernels.triton.backend import Triton
from pallas_kernels.triton.call import OPTIONS, Call

_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32"}


class Compiled(NamedTuple):
    """A kernel compiled for one kind of GPU.

    Attributes:
        name: kernel name.
        ptx: its code.
        shared_bytes: shared memory per thread block.
        registers: registers per thread.
        spilled_bytes: register spills per thread.
    """

    name: str
    ptx: str
    shared_bytes: int
    registers: int
    spilled_bytes: int


def compile_call(call: Call, capability: int) -> Compiled:
    """Compiles a call for a compute capability, such as 80 for 8.0."""
    operands = call.arrays | call.outputs
    signature, constants, attributes = {}, dict(call.constants), {}
    for place, name in enumerate(call.kernel.arg_names):
        if operands.get(name) is not None:
            signature[name] = "*" + _TYPES[operands[name].dtype.name]
            attributes[place,] = [["tt.divisibility", 16]]
        elif name in call.numbers:
            signature[name] = "i32" if isinstance(call.numbers[name], int) else "fp32"
        else:
            signature[name] = "constexpr"
            constants.setdefault(name, None)
    source = ASTSource(call.kernel, signature, constants, attributes)
    options = {"num_warps": call.config.warps, "num_stages": call.config.stages, **OPTIONS}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    report = assemble(kernel.asm["ptx"], f"sm_{capability}{'a' if capability >= 90 else ''}")
    return Compiled(
        call.kernel.fn.__name__,
        kernel.asm["ptx"],
        kernel.metadata.shared,
        int(re.search(r"Used (\d+) registers", report)[1]),
        int(re.search(r"(\d+) bytes spill stores", report)[1]),
    )


def assemble(ptx: str, gpu: str) -> str:
    """Returns the output of Triton's assembler for a GPU, such as sm_80."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={gpu}", file.name]
        command += ["-o", "/dev/null"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr


class Problem(NamedTuple):
    """Sizes and kinds of a call of both passes.

    Attributes:
        tiles: shapes of the tiles; None for none.
        columns: shapes of the columns; None for none.
        dim: head dim.
        dtype: dtype of queries and keys.
        running: whether results are fp32 and added to running ones.
    """

    tiles: object
    columns: object
    dim: int
    dtype: str = "bfloat16"
    running: bool = False


def calls_of(
    problem: Problem,
    capability: int,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    query_length: int,
    key_length: int,
) -> list[Call]:
    """Returns the kernel calls of a forward and a backward pass, on arrays of shapes only."""
    calls = []

    def record(call: Call) -> dict[str, Array]:
        calls.append(call)
        return {name: jnp.zeros(x.shape, x.dtype) for name, x in call.outputs.items()}

    name = "recorded triton"
    backends.register(Triton(name, run=record, capability=capability))
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=problem.dtype)
    q, k = (
        shape((batch, n, h, problem.dim))
        for n, h in ((query_length, heads), (key_length, kv_heads))
    )
    row = jax.ShapeDtypeStruct((batch, heads, query_length), jnp.float32)
    out0 = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    column_kv = None
    if problem.columns is not None:
        column_kv = 2 * (shape((batch, problem.columns.tokens.shape[-1], heads, problem.dim)),)

    def both(q, k, out0, row, tiles, columns, column_kv):
        plan = pallas_kernels.plan(q, k, tiles, columns, backend=name)
        init = (out0, row) if problem.running else None
        out, lse = pallas_kernels.forward(q, k, k, plan, column_kv, init=init)
        delta = pallas_kernels.delta_of(out, q, backend=name)
        dq_dtype = jnp.float32 if problem.running else q.dtype
        return pallas_kernels.backward(q, k, k, q, lse, delta, plan, column_kv, dq_dtype=dq_dtype)

    jax.eval_shape(both, q, k, out0, row, problem.tiles, problem.columns, column_kv)
    return calls
