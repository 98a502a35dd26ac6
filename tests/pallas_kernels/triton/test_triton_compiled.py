"""The Triton kernels compiled for GPUs on a machine without one: code, memory and registers."""

import functools
import importlib.util
import math
import os
import re

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from benchmarks.kernels import triton_sm80, tune
from mtraining_jax import VerticalSlash, sparse_attention
from pallas_kernels import DenseIndex
from pallas_kernels.interface import NUM_QUERIES, ProbeCall
from pallas_kernels.triton.call import Call
from pallas_kernels.triton.selection import TritonBlockScores, TritonEstimate
from tests.pallas_kernels.helpers.described import (
    A100,
    H200,
    HK,
    HQ,
    NK,
    NQ,
    B,
    G,
    columns_of,
    index,
    qkv,
    shaped,
    target,
    tiles_of,
)

if importlib.util.find_spec("jax_triton") is None:
    pytest.skip("needs the triton extra", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton does not compile with TRITON_INTERPRET=1", allow_module_level=True)

from tests.pallas_kernels.triton.triton_compiled import Compiled, Problem, calls_of, compile_call  # noqa: E402

# Limits per thread block, and per thread.
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 100: 227 * 1024, 120: 99 * 1024}
SPILLED_BYTES, SPILLED_BYTES_120 = 32, 72


def _compiled(problem: Problem, capability: int) -> dict[str, Compiled]:
    sizes = dict(batch=B, heads=HQ, kv_heads=HK, query_length=NQ, key_length=NK)
    found = (compile_call(x, capability) for x in calls_of(problem, capability, **sizes))
    return {kernel.name: kernel for kernel in found}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", ["segments", "listed", "window"])
@pytest.mark.parametrize("capability", [80, 86, 100, 120])
def test_kernels_for_other_gpus_than_hopper(capability, dim, kind):
    """The kinds of tiles with most code, with columns, and results added to running ones.

    Windows have neither.
    """
    columns = None if kind == "window" else columns_of(dim, "bfloat16")[0]
    running = kind != "window"
    kernels = _compiled(Problem(tiles_of(kind), columns, dim, running=running), capability)
    names = {"attention_forward", "attention_dq", "attention_dkdv", "attention_delta"}
    assert kernels.keys() == names | ({"attention_dkdv_columns"} if columns is not None else set())
    for name, kernel in kernels.items():
        assert kernel.shared_bytes <= SHARED_BYTES[capability], name
        most = SPILLED_BYTES_120 if capability == 120 else SPILLED_BYTES
        assert kernel.spilled_bytes <= most, name
        assert "wgmma" not in kernel.ptx, name
        assert f".target sm_{capability}" in kernel.ptx, name
        if name != "attention_delta":
            product = "tcgen05.mma" if capability == 100 else "mma.sync"
            assert product in kernel.ptx and "cp.async" in kernel.ptx, name


@pytest.mark.parametrize(("length", "columns"), [(64, 64), (128, 128), (1024, 16)])
def test_the_kernel_that_scores_key_blocks_for_an_a100(length, columns):
    """Rows of tokens with both head dims, and of strides of 8 tokens."""
    calls = []

    def record(call):
        calls.append(call)
        return {name: jnp.zeros(x.shape, x.dtype) for name, x in call.outputs.items()}

    blocks = 16
    args = (
        shaped(1, HQ, blocks, 16, length),
        shaped(1, HK, blocks, columns, length),
        shaped(1, blocks, 16, dtype=jnp.int32),
        shaped(1, blocks, dtype=jnp.int32),
    )
    scores = TritonBlockScores(record)
    assert scores.unsupported(*args[:2]) is None
    jax.eval_shape(functools.partial(scores.block_masses, scale=0.1), *args)
    (kernel,) = (compile_call(call, 80) for call in calls)
    assert kernel.shared_bytes <= SHARED_BYTES[86] and kernel.spilled_bytes <= SPILLED_BYTES
    assert "mma.sync" in kernel.ptx and "cp.async.cg" in kernel.ptx and "wgmma" not in kernel.ptx


def _estimate_calls(dim: int, blocks: int) -> list[Call]:
    """The calls that score some blocks of a longer sequence by its last queries."""
    calls = []

    def record(call: Call):
        calls.append(call)
        return {name: jnp.zeros(x.shape, x.dtype) for name, x in call.outputs.items()}

    kernels, row = TritonEstimate(record), shaped(B, HQ, NUM_QUERIES, dtype="float32")
    where = (
        shaped(B, HQ, NUM_QUERIES, dim),
        shaped(B, blocks * G, HK, dim),
        shaped(blocks, dtype=jnp.int32),
    )

    def both(q, k, block_ids, row):
        call = ProbeCall(q, k, block_ids, num_blocks=1024, scale=0.1)
        return kernels.block_statistics(call), kernels.block_masses(call, row, row)

    jax.eval_shape(both, *where, row)
    return calls


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("capability", [80, 86])
def test_the_kernels_that_score_by_the_last_queries(capability, dim):
    kernels = [compile_call(call, capability) for call in _estimate_calls(dim, blocks=4)]
    assert [kernel.name for kernel in kernels] == ["estimate_statistics", "estimate_masses"]
    for kernel in kernels:
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel.name
        assert kernel.spilled_bytes <= SPILLED_BYTES, kernel.name
        assert "mma.sync" in kernel.ptx and "cp.async.cg" in kernel.ptx, kernel.name
        assert "wgmma" not in kernel.ptx and "atom" not in kernel.ptx, kernel.name
        assert f".target sm_{capability}" in kernel.ptx, kernel.name


def test_ranks_score_by_the_last_queries_with_the_same_code():
    """One block and all: Triton specializes code for counts divisible by 16, and for 1."""
    for one, every in zip(_estimate_calls(64, 1), _estimate_calls(64, 1024), strict=True):
        assert one.kernel is every.kernel and one.config == every.config
        assert one.constants == every.constants and one.numbers == every.numbers
        assert not any(isinstance(x, int) for x in one.numbers.values())


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the CUDA plugin of JAX"
)
def test_vertical_slash_scores_and_attends_by_kernels_on_an_a100():
    q, k, v = qkv(128, "bfloat16", nk=NQ)
    attention = functools.partial(sparse_attention, pattern=VerticalSlash())
    with target(A100):
        lowered = jax.jit(attention).trace(q, k, v).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @triton_kernel_call_ffi") == 3


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the CUDA plugin of JAX"
)
def test_the_default_pattern_scores_and_attends_by_kernels_on_an_a100():
    q, k, v = qkv(128, "bfloat16", nk=NQ)
    with target(A100):
        lowered = jax.jit(sparse_attention).trace(q, k, v).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @triton_kernel_call_ffi") == 2


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the CUDA plugin of JAX"
)
@pytest.mark.parametrize("mapped", [False, True])
def test_attention_with_gradients_lowers_for_an_a100(mapped):
    """Automatically selected: forward, delta, dk and dv of blocks and of columns, dq."""
    q, k, v = qkv(64, "bfloat16", nk=NQ)

    def loss(q, k, v, index):
        return pallas_kernels.attention(q, k, v, index).astype(jnp.float32).sum()

    gradients, args = jax.grad(loss, argnums=(0, 1, 2)), (q, k, v, index())
    if mapped:
        gradients = jax.vmap(gradients)
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), args)
    with target(A100):
        text = jax.jit(gradients).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @triton_kernel_call_ffi") == 5


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_the_tuner_runs_one_kernel_with_the_given_sizes(kernel):
    """Of everything traced, the compiler keeps only what the results need."""
    q, k, v = qkv(64, "bfloat16", nk=NQ)
    row = shaped(B, HQ, NQ, dtype="float32")
    columns, column_kv = columns_of(64, "bfloat16")
    with target(A100):
        found = tune.candidates(kernel, 64, "triton")
        plan = jax.eval_shape(
            functools.partial(pallas_kernels.plan, backend="triton"),
            q,
            k,
            tiles_of("diagonals"),
            None,
        )
        with tune.with_config(kernel, 64, found[-1], "triton"):
            traced = jax.jit(tune.program(kernel)).trace(q, k, v, q, row, row, plan, None)
    name = {"forward": "attention_forward", "dq": "attention_dq", "dkdv": "attention_dkdv"}[kernel]
    grids = [
        math.prod(call.params["grid"])
        for call in _calls(traced.jaxpr.jaxpr)
        if call.params["name"] == name
    ]
    config, items = found[-1], B * HQ * NQ // 128
    expected = items * 128 // config.rows
    if kernel == "dkdv":
        expected = B * HK * NQ // config.keys
    assert grids == [expected] and len({(c.rows, c.keys, c.warps, c.stages) for c in found}) > 2


def _calls(jaxpr):
    """Calls of Triton kernels in a jaxpr and its inner jaxprs."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "triton_kernel_call":
            yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from _calls(getattr(inner, "jaxpr", inner))


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the CUDA plugin of JAX"
)
def test_a100_code_is_assembled_for_the_local_gpu(monkeypatch):
    """The kernels of `--also triton_sm80` in the attention benchmark, and those with them."""
    from jax_triton import triton_lib

    jaxlib, found = triton_lib.triton_kernel_call_lib, []

    class Recorded:
        def __getattr__(self, name):
            return getattr(jaxlib, name)

        def TritonKernel(self, *args):
            found.append((re.search(r"\.target (\w+)", args[4])[1], args[6]))
            return jaxlib.TritonKernel(*args)

    monkeypatch.setattr(triton_lib, "triton_kernel_call_lib", Recorded())
    q, k, v = qkv(64, "bfloat16", nk=NQ)
    for name in ("triton", triton_sm80.register()):
        attention = functools.partial(pallas_kernels.attention, index=DenseIndex(G), backend=name)
        with target(H200):
            jax.jit(attention).trace(q, k, v).lower(lowering_platforms=("cuda",))
    assert found == [("sm_90a", 90), ("sm_80", 90)]
