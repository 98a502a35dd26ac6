"""The Hopper kernels lowered for an H200 on a machine without a GPU.

Lowering runs all of Pallas up to MLIR: it checks shapes, dtypes, layouts, transforms and barriers
of every shipped configuration, but not the machine code.
"""

import dataclasses
import functools
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir

import pallas_kernels
from pallas_kernels import DenseIndex, backends
from pallas_kernels.decode import DecodeCall, decode
from pallas_kernels.key_codes import KeyCodes, block_weights, selected_blocks
from pallas_kernels.mosaic_gpu.backend import CONFIGS, MosaicGpu
from pallas_kernels.triton import device
from pallas_kernels.work.fused_work import FusedWork
from tests.pallas_kernels.helpers.described import (
    A100,
    H200,
    HQ,
    NQ,
    B,
    G,
    columns_of,
    gpu,
    index,
    int32,
    qkv,
    shaped,
    target,
    tiles_of,
)


def _kernels(f, *args) -> int:
    """Lowers f for an H200; returns the number of Mosaic GPU kernels that it calls."""
    with target(H200):
        lowered = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",))
    found = []

    def visit(operation):
        if operation.name == "stablehlo.custom_call":
            found.append(ir.StringAttr(operation.attributes["call_target_name"]).value)
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(visit)  # the text is long: it contains the kernels
    return sum(name.startswith("mosaic_gpu") for name in found)


def _backward(q, k, v, dout, lse, delta, tiles, columns, **options):
    columns, column_kv = columns
    plan = pallas_kernels.plan(q, k, tiles, columns)
    return pallas_kernels.backward(q, k, v, dout, lse, delta, plan, column_kv, **options)


# Head dim, tiles, whether there are columns, dtype, and whether results are fp32 and added to
# running ones. Another dtype only changes a word in the same code, and tiles are processed alike
# for all head dims: each head dim tests its configuration with two or three kinds of tiles.
PROBLEMS = [
    (64, "diagonals", True, "bfloat16", False),
    pytest.param(64, "none", True, "bfloat16", True, marks=pytest.mark.slow),
    (64, "listed", True, "float16", True),
    (128, "segments", True, "bfloat16", True),
]


@pytest.mark.parametrize(("dim", "kind", "has_columns", "dtype", "running"), PROBLEMS)
def test_both_passes_lower(dim, kind, has_columns, dtype, running):
    """One plan, the forward kernel, and those for dq and for dk and dv."""
    columns = columns_of(dim, dtype) if has_columns else (None, None)
    q, k, v = qkv(dim, dtype)
    row = shaped(B, HQ, NQ, dtype="float32")
    init = (shaped(B, NQ, HQ, dim, dtype="float32"), row) if running else None
    dq_dtype = "float32" if running else dtype

    def both(q, k, v, lse, delta, tiles, columns, init):
        columns, column_kv = columns
        plan = pallas_kernels.plan(q, k, tiles, columns)
        out = pallas_kernels.forward(q, k, v, plan, column_kv, init=init)
        args = q, k, v, q, lse, delta, plan, column_kv
        return out, pallas_kernels.backward(*args, dq_dtype=dq_dtype)

    assert _kernels(both, q, k, v, row, row, tiles_of(kind), columns, init) == 3


# Few, since each takes seconds: a case for the fused kernel, and each reason not to use it.
@pytest.mark.parametrize(
    ("dim", "kind", "has_columns", "dq_dtype"),
    [
        (64, "dense", True, "bfloat16"),
        (128, "dense", True, "float32"),
        (128, "dense", False, "bfloat16"),
        (128, "dense segments", True, "float32"),
        (64, "diagonals", True, "float32"),
        (64, "none", True, "float32"),
        (64, "segments", False, "float32"),
        (64, "listed", False, "float32"),
    ],
)
def test_one_backward_kernel_over_dense_diagonals(dim, kind, has_columns, dq_dtype):
    columns = columns_of(dim, "bfloat16") if has_columns else (None, None)
    q, k, v = qkv(dim, "bfloat16")
    row = shaped(B, HQ, NQ, dtype="float32")
    backward = functools.partial(_backward, dq_dtype=dq_dtype)
    args = q, k, v, q, row, row, tiles_of(kind), columns
    if "dense" in kind:
        assert _kernels(backward, *args) == 1
    else:  # lowered above
        with target(H200):
            plan = jax.eval_shape(pallas_kernels.plan, q, k, tiles_of(kind), columns[0])
        assert not isinstance(plan.work.keys, FusedWork)
    with target(H200):
        grads = jax.eval_shape(backward, *args)
    assert (grads.dq.shape, grads.dq.dtype) == (q.shape, dq_dtype)
    keys = None if kind == "none" else (k.shape, "float32")
    of_columns = (columns[1][0].shape, "float32") if has_columns else None
    for x, expected in zip(grads[1:], (keys, keys, of_columns, of_columns), strict=True):
        assert (x if x is None else (x.shape, x.dtype)) == expected


def test_dense_attention_with_gradients_lowers():
    """Three kernels, including delta's; `jax.vmap` runs the last one for one entry at a time.

    Cases without vmap are lowered in parts in the tests above.
    """
    q, k, v = qkv(64, "bfloat16", nk=NQ)

    def loss(q, k, v):
        return pallas_kernels.attention(q, k, v, DenseIndex(G)).astype(jnp.float32).sum()

    gradients = jax.vmap(jax.grad(loss, argnums=(0, 1, 2)))
    q, k, v = (jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in (q, k, v))
    assert _kernels(gradients, q, k, v) == 3


def test_attention_with_gradients_lowers(monkeypatch):
    """One device, starting from the index, with automatic selection of kernels.

    Forward, delta, and two kernels for gradients, since dq in fp32 would be too large for one.
    """
    q, k, v = qkv(128, "bfloat16", nk=NQ)
    config = dataclasses.replace(CONFIGS[128], fused_sparse_bytes=q.size * 4 - 1)
    monkeypatch.setitem(CONFIGS, 128, config)

    def loss(q, k, v, index):
        out = pallas_kernels.attention(q, k, v, index)
        return out.astype(jnp.float32).sum()

    assert _kernels(jax.grad(loss, argnums=(0, 1, 2)), q, k, v, index()) == 4


def test_hopper_gpus_use_the_hopper_kernels():
    q = jnp.zeros((1, G, 1, 64), jnp.bfloat16)
    with target(H200):
        for choice in (None, "auto", "mosaic_gpu"):
            assert backends.resolve(choice, q, G).name == "mosaic_gpu"
        assert backends.resolve("xla", q, G).name == "xla"
        for x, block_size in (
            (q.astype(jnp.float32), G),
            (jnp.zeros((1, G, 1, 80), jnp.bfloat16), G),
            (q, 64),
        ):
            assert backends.resolve(None, x, block_size).name == "xla"


def test_other_machines_use_the_portable_backend():
    q = jnp.zeros((1, G, 1, 64), jnp.bfloat16)
    found = backends.describe(None, q, G)
    assert found == ("xla", "no GPU (platform cpu)")
    with target(gpu("Tesla T4", "7.5")):
        found = backends.describe(None, q, G)
    assert found == ("xla", "the target is a Tesla T4, not a Hopper GPU")


def test_a_backend_that_replaces_the_hopper_one_decides_where_it_runs(monkeypatch):
    monkeypatch.setattr(backends, "_registered", dict(backends._registered))
    backends.register(MosaicGpu(interpret=True))
    q = jnp.zeros((1, G, 1, 64), jnp.bfloat16)
    assert backends.describe("mosaic_gpu", q, G) == ("mosaic_gpu", None)


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("kind", [A100, gpu("NVIDIA B200", "10.0")])
def test_gpus_except_hopper_use_triton_if_installed(kind, installed, monkeypatch, caplog):
    """One line reports what is missing, if anything."""
    monkeypatch.setattr(device, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(device, "unfit_triton", lambda: None)
    backends._log_once.cache_clear()
    q = jnp.zeros((1, G, 1, 64), jnp.bfloat16)
    with target(kind):
        assert backends.resolve(None, q, G).name == ("triton" if installed else "xla")
        assert backends.resolve(None, q.astype(jnp.float32), G).name == "xla"
        assert backends.resolve("xla", q, G).name == "xla"
        if not installed:
            with pytest.raises(ValueError, match="backend='triton' cannot run here: .* triton"):
                backends.resolve("triton", q, G)
    missing = "Triton kernels need the triton extra: uv sync --extra triton, or pip install"
    assert [missing in line for line in caplog.messages] == ([False] if installed else [True])


def test_triton_runs_on_hopper_gpus_only_by_name(monkeypatch):
    monkeypatch.setattr(device, "find_spec", lambda name: True)
    monkeypatch.setattr(device, "unfit_triton", lambda: None)
    q = jnp.zeros((1, G, 1, 64), jnp.bfloat16)
    with target(H200):
        assert backends.resolve(None, q, G).name == "mosaic_gpu"
        assert backends.resolve("triton", q, G).name == "triton"
        with pytest.raises(ValueError, match="backend='triton' cannot run here: head dim 80"):
            backends.resolve("triton", jnp.zeros((1, G, 1, 80), jnp.bfloat16), G)
    needed = r"compute capability 7.5 \(must be 8.0 or later\)"
    with target(gpu("Tesla T4", "7.5")), pytest.raises(ValueError, match=needed):
        backends.resolve("triton", q, G)
    with pytest.raises(ValueError, match="backend='triton' cannot run here: no NVIDIA GPU"):
        backends.resolve("triton", q, G)


class _Packages:
    """Installed packages as reported by `importlib.metadata`: an old Triton, or none."""

    PackageNotFoundError = KeyError

    def __init__(self, versions):
        self.versions = versions

    def version(self, package):
        return self.versions[package]

    def requires(self, package):
        return ["jax>=0.11.0", f"triton>={self.versions['jax-triton-needs']}"]


OLD = {"triton": "3.6.0", "jax-triton": "0.4.1", "jax-triton-needs": "3.7"}


@pytest.mark.parametrize(
    ("backend", "versions", "reason"),
    [
        (types.SimpleNamespace(), OLD, r"jax-triton 0.4.1 cannot load the NVIDIA backend of "
         r"triton 3.6.0 \(it needs triton>=3.7\)$"),
        (types.SimpleNamespace(), {}, r"jax-triton of unknown version cannot load .* a later one"),
        (None, OLD, r"jax-triton 0.4.1 cannot be imported: "),
        (types.ModuleType("triton.backends.nvidia.compiler"), {}, None),
    ],
)  # fmt: skip
def test_an_incompatible_triton_is_named(backend, versions, reason, monkeypatch):
    """jax-triton puts an empty namespace where Triton's NVIDIA backend cannot be imported."""
    library = types.SimpleNamespace(triton_lib=types.SimpleNamespace(cb=backend))
    monkeypatch.setitem(sys.modules, "jax_triton", library if backend else None)
    monkeypatch.setattr(device, "find_spec", lambda name: True)
    monkeypatch.setattr(device, "metadata", _Packages(versions))
    device.unfit_triton.cache_clear()
    q = jnp.zeros((1, G, 1, 64), jnp.bfloat16)
    try:
        with target(A100):
            if reason is None:
                assert backends.resolve("triton", q, G).name == "triton"
                return
            with pytest.raises(ValueError, match="backend='triton' cannot run here: " + reason):
                backends.resolve("triton", q, G)
            assert backends.resolve(None, q, G).name == "xla"
    finally:
        device.unfit_triton.cache_clear()


def test_requesting_an_unavailable_backend_explains_why():
    q = jnp.zeros((1, G, 1, 64), jnp.bfloat16)

    def ask(q, block_size=G):
        pallas_kernels.attention(q, q, q, DenseIndex(block_size), backend="mosaic_gpu")

    cannot = "backend='mosaic_gpu' cannot run here: "
    with pytest.raises(ValueError, match=cannot + r"no GPU \(platform cpu\)"):
        ask(q)
    with target(A100), pytest.raises(ValueError, match=cannot + "the target is a NVIDIA A100"):
        ask(q)
    with target(H200):
        with pytest.raises(ValueError, match=cannot + "dtype float32"):
            ask(q.astype(jnp.float32))
        with pytest.raises(ValueError, match=cannot + "head dim 80"):
            ask(jnp.zeros((1, G, 1, 80), jnp.bfloat16))
        with pytest.raises(ValueError, match=cannot + "block_size 64"):
            ask(q, block_size=64)


@pytest.mark.parametrize("dim", [64, 128])
def test_attention_of_new_tokens_lowers(dim):
    cache = shaped(B, 2, 8 * G, dim)
    arrays = shaped(B, HQ, dim), cache, cache, int32(1, 1, 8), int32(1, 1), int32(1, 8, 2)
    # Parts of the sequence are combined by a second one.
    assert _kernels(lambda *arrays: decode(DecodeCall(*arrays, 0.1)), *arrays) == 2


@pytest.mark.parametrize("dim", [64, 128])
def test_the_selection_of_new_tokens_lowers(dim):
    def select(q, seen, *keys):
        weights, totals = block_weights(q, KeyCodes(*keys), seen, 0.1)
        return selected_blocks(weights, totals, q, jnp.zeros((1, 8), bool), jnp.full(1, 0.1))

    range_of_keys = shaped(B, 2, 1, dim, dtype=jnp.float32)
    codes = int32(B, 2, 8 * G, dim // 8)
    arrays = shaped(B, HQ, dim), int32(1, 8, 2), codes, range_of_keys, range_of_keys
    assert _kernels(select, *arrays) == 2
