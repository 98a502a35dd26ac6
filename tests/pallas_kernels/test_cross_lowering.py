"""The Hopper kernels lowered for an H200 on a machine that has no GPU.

Lowering runs everything of Pallas up to MLIR: shapes, dtypes, layouts, transforms and barriers of
every shipped configuration are checked, the machine code is not.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_kernels
from pallas_kernels import (
    Columns,
    DenseIndex,
    DiagonalTiles,
    ListedTiles,
    SegmentedDiagonals,
    VerticalSlashIndex,
    backends,
)
from pallas_kernels.mosaic_gpu.configs import CONFIGS
from pallas_kernels.work.fused_work import FusedWork

B, NQ, NK, HQ, HK, G = 2, 1024, 512, 6, 2, 128  # lengths differ in a ring step
KERNEL = "custom_call @mosaic_gpu"


@dataclasses.dataclass(frozen=True)
class _Gpu(AbstractDevice):
    compute_capability: str = "9.0"


H200 = _Gpu(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
A100 = _Gpu(
    device_kind="NVIDIA A100-SXM4-80GB", platform="gpu", num_cores=108, compute_capability="8.0"
)


def _target(device: AbstractDevice):
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def _kernels(f, *args) -> int:
    """Lowers f for an H200; the number of Mosaic GPU kernels it calls."""
    with _target(H200):
        text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return text.count(KERNEL)


def _array(*shape: int, dtype="bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return _array(*shape, dtype=jnp.int32)


def _qkv(dim: int, dtype: str, nk: int = NK):
    return _array(B, NQ, HQ, dim, dtype=dtype), *(2 * [_array(B, nk, HK, dim, dtype=dtype)])


def _index() -> VerticalSlashIndex:
    return VerticalSlashIndex(
        _int32(B, HQ, 5), _int32(B, HQ), _int32(B, HQ, 200), _int32(B, HQ), G
    )


def _tiles(kind: str):
    if kind == "none":
        return None
    if kind in ("diagonals", "dense"):
        lists = _int32(B, HQ, 7), _int32(B, HQ), _int32(B, HQ), _int32()
        return DiagonalTiles(*lists, G, dense=kind == "dense")
    if "segments" in kind:
        lists = _int32(B, HQ, 7), _int32(B, HQ, 3), _int32(B, HQ, 3), _int32(3), _int32()
        return SegmentedDiagonals(*lists, 4, G, dense="dense" in kind)
    rows, columns = NQ // G, NK // G
    return ListedTiles(
        _int32(B, HQ, rows, columns), _int32(B, HQ, rows),
        _int32(B, HQ, columns, rows), _int32(B, HQ, columns), _int32(), G,
    )


def _columns(dim: int, dtype: str):
    """Columns as a shard of half the query blocks of a sequence sees them, and their keys."""

    def build(index):
        blocks = 2 * jnp.arange(NQ // G, dtype=jnp.int32)
        return Columns.from_index(index, blocks, 2 * NQ // G)

    return jax.eval_shape(build, _index()), 2 * (_array(B, 256, HQ, dim, dtype=dtype),)


def _backward(q, k, v, dout, lse, delta, tiles, columns, **options):
    columns, column_kv = columns
    plan = pallas_kernels.plan(q, k, tiles, columns)
    return pallas_kernels.backward(q, k, v, dout, lse, delta, plan, column_kv, **options)


# Tiles, whether there are columns, dtype, and whether results are fp32 and added to running ones.
PROBLEMS = [
    ("diagonals", True, "bfloat16", False),
    ("diagonals", False, "bfloat16", True),
    ("diagonals", True, "float16", True),
    ("none", True, "bfloat16", True),
    ("segments", True, "bfloat16", True),
    ("listed", False, "bfloat16", False),
    ("listed", True, "float16", True),
]


# Another dtype is another word in the same code: one head dim shows it.
OF_DIMS = [
    (dim, *problem)
    for dim in CONFIGS
    for problem in PROBLEMS
    if dim == 64 or problem[2] != "float16"
]


@pytest.mark.parametrize(("dim", "kind", "has_columns", "dtype", "running"), OF_DIMS)
def test_both_passes_lower(dim, kind, has_columns, dtype, running):
    """One plan, the forward kernel, and those for dq and for dk and dv."""
    columns = _columns(dim, dtype) if has_columns else (None, None)
    q, k, v = _qkv(dim, dtype)
    row = _array(B, HQ, NQ, dtype="float32")
    init = (_array(B, NQ, HQ, dim, dtype="float32"), row) if running else None
    dq_dtype = "float32" if running else dtype

    def both(q, k, v, lse, delta, tiles, columns, init):
        columns, column_kv = columns
        plan = pallas_kernels.plan(q, k, tiles, columns)
        out = pallas_kernels.forward(q, k, v, plan, column_kv, init=init)
        args = q, k, v, q, lse, delta, plan, column_kv
        return out, pallas_kernels.backward(*args, dq_dtype=dq_dtype)

    assert _kernels(both, q, k, v, row, row, _tiles(kind), columns, init) == 3


# Few, as each takes seconds: what the fused kernel takes, and every reason not to take it.
@pytest.mark.parametrize(
    ("dim", "kind", "has_columns", "dq_dtype"),
    [
        (64, "dense", True, "bfloat16"),
        (64, "dense", False, "float32"),
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
    columns = _columns(dim, "bfloat16") if has_columns else (None, None)
    q, k, v = _qkv(dim, "bfloat16")
    row = _array(B, HQ, NQ, dtype="float32")
    backward = functools.partial(_backward, dq_dtype=dq_dtype)
    args = q, k, v, q, row, row, _tiles(kind), columns
    if "dense" in kind:
        assert _kernels(backward, *args) == 1
    else:  # lowered above
        with _target(H200):
            plan = jax.eval_shape(pallas_kernels.plan, q, k, _tiles(kind), columns[0])
        assert not isinstance(plan.work.keys, FusedWork)
    with _target(H200):
        grads = jax.eval_shape(backward, *args)
    assert (grads.dq.shape, grads.dq.dtype) == (q.shape, dq_dtype)
    keys = None if kind == "none" else (k.shape, "float32")
    of_columns = (columns[1][0].shape, "float32") if has_columns else None
    for x, expected in zip(grads[1:], (keys, keys, of_columns, of_columns), strict=True):
        assert (x if x is None else (x.shape, x.dtype)) == expected


@pytest.mark.parametrize("mapped", [False, True])
def test_dense_attention_with_gradients_lowers(mapped):
    """Three kernels, delta's included; `jax.vmap` runs the last one entry after another."""
    q, k, v = _qkv(64, "bfloat16", nk=NQ)

    def loss(q, k, v):
        return pallas_kernels.attention(q, k, v, DenseIndex(G)).astype(jnp.float32).sum()

    gradients = jax.grad(loss, argnums=(0, 1, 2))
    if mapped:
        gradients = jax.vmap(gradients)
        q, k, v = (jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in (q, k, v))
    assert _kernels(gradients, q, k, v) == 3


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dim", CONFIGS)
def test_attention_with_gradients_lowers(dim, large, monkeypatch):
    """One device, from the index on: kernels chosen without being named.

    Forward, delta and one kernel for all gradients, two where dq in fp32 would be too large.
    """
    q, k, v = _qkv(dim, "bfloat16", nk=NQ)
    config = dataclasses.replace(CONFIGS[dim], fused_sparse_bytes=q.size * 4 - large)
    monkeypatch.setitem(CONFIGS, dim, config)

    def loss(q, k, v, index):
        out = pallas_kernels.attention(q, k, v, index)
        return out.astype(jnp.float32).sum()

    assert _kernels(jax.grad(loss, argnums=(0, 1, 2)), q, k, v, _index()) == (4 if large else 3)


def test_the_hopper_kernels_are_chosen_for_a_hopper_gpu():
    q = jnp.zeros((1, G, 1, 64), jnp.bfloat16)
    with _target(H200):
        for choice in (None, "auto", "mosaic_gpu"):
            assert backends.resolve(choice, q, G).name == "mosaic_gpu"
        assert backends.resolve("xla", q, G).name == "xla"
        for x, block_size in (
            (q.astype(jnp.float32), G), (jnp.zeros((1, G, 1, 80), jnp.bfloat16), G), (q, 64)
        ):
            assert backends.resolve(None, x, block_size).name == "xla"


def test_other_machines_get_the_portable_backend():
    q = jnp.zeros((1, G, 1, 64), jnp.bfloat16)
    assert backends.resolve(None, q, G).name == "xla"
    with _target(A100):
        assert backends.resolve(None, q, G).name == "xla"


def test_asking_by_name_where_it_cannot_run_says_why():
    q = jnp.zeros((1, G, 1, 64), jnp.bfloat16)

    def ask(q, block_size=G):
        pallas_kernels.attention(q, q, q, DenseIndex(block_size), backend="mosaic_gpu")

    cannot = "backend='mosaic_gpu' cannot run here: "
    with pytest.raises(ValueError, match=cannot + r"no GPU \(platform cpu\)"):
        ask(q)
    with _target(A100), pytest.raises(ValueError, match=cannot + "the target is a NVIDIA A100"):
        ask(q)
    with _target(H200):
        with pytest.raises(ValueError, match=cannot + "dtype float32"):
            ask(q.astype(jnp.float32))
        with pytest.raises(ValueError, match=cannot + "head dim 80"):
            ask(jnp.zeros((1, G, 1, 80), jnp.bfloat16))
        with pytest.raises(ValueError, match=cannot + "block_size 64"):
            ask(q, block_size=64)
