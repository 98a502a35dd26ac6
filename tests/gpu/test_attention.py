"""The Hopper kernels: the shared contract at real sizes, then longer sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import VerticalSlashIndex, WindowIndex
from tests.pallas_kernels.helpers import cases
from tests.pallas_kernels.helpers.cases import Size
from tests.pallas_kernels.helpers.contract import (
    AttentionContract,
    backward,
    forward,
    resolve_index,
)
from tests.pallas_kernels.helpers.expected import assert_same_bits, compare_on_device, oracle
from tests.pallas_kernels.mosaic_gpu.hopper_backends import registered

LONG = 65536  # tokens


class TestMosaicGpu(AttentionContract):
    """With two backward kernels; `test_fused_backward.py` tests the fused one."""

    backend = registered("mosaic_gpu, two backward kernels", one_backward_kernel=False)
    dtypes = ("bfloat16", "float16")
    block_size = 128
    dim = 128
    other_dims = (64,)
    num_blocks = 16
    group_heads = ((2, 2), (5, 1), (12, 2), (14, 2), (8, 1))  # groups of 1, 5, 6, 7 and 8
    max_slashes = 6
    max_verticals = 200


@functools.partial(jax.jit, static_argnames="backend")
def _value_and_gradients(q, k, v, dout, index, *, backend):
    def attention(q, k, v):
        return pallas_kernels.attention(q, k, v, index, backend=backend)

    out, vjp = jax.vjp(attention, q, k, v)
    return dict(zip(("out", "dq", "dk", "dv"), (out, *vjp(dout)), strict=True))


def _long(dim: int) -> tuple[np.random.Generator, Size, VerticalSlashIndex]:
    rng = np.random.default_rng(dim)
    size = Size(1, 8, 2, LONG // 128, LONG // 128, block_size=128, dim=dim)
    return rng, size, cases.vertical_slash(rng, size, max_slashes=32, max_verticals=1000)


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_counts_the_same_pairs_as_xla_at_64k_tokens(dim):
    """All sums are integers, so two correct backends are bit-identical."""
    rng, size, index = _long(dim)
    q, k, v, dout = cases.counting(rng, size, "bfloat16")
    tiles, columns, column_kv = resolve_index(index, k, v)
    zeros = jnp.zeros((1, size.heads, size.seq_len), jnp.float32)
    lse, grads = {}, {}
    for name in ("mosaic_gpu", "xla"):
        options = {"scale": 1.0, "backend": name}
        _, lse[name] = forward(q, k, v, tiles, columns, column_kv, **options)
        grads[name] = backward(q, k, v, dout, zeros, zeros, tiles, columns, column_kv, **options)
    np.testing.assert_allclose(*lse.values(), rtol=2e-6)
    for name, x in grads["mosaic_gpu"]._asdict().items():
        np.testing.assert_array_equal(x, getattr(grads["xla"], name), err_msg=name)


@pytest.mark.parametrize(("dim", "window"), [(64, 1000), (128, 1024), (256, 1024)])
def test_windows_count_the_same_pairs_as_xla_at_64k_tokens(dim, window):
    rng = np.random.default_rng(dim)
    size = Size(2, 8, 2, LONG // 128, LONG // 128, block_size=128, dim=dim)
    q, k, v, dout = cases.counting(rng, size, "bfloat16")
    lengths = [[LONG // 128], [5, 300, -3, 1, 100, 90]]
    index = WindowIndex(cases.dense_documents(size, lengths), window)
    tiles, _ = index.on_one_device(size.batch, LONG, size.heads, LONG)
    zeros = jnp.zeros((size.batch, size.heads, LONG), jnp.float32)
    lse, grads = {}, {}
    for name in ("mosaic_gpu", TestMosaicGpu.backend, "xla"):
        options = {"scale": 1.0, "backend": name}
        _, lse[name] = forward(q, k, v, tiles, **options)
        grads[name] = backward(q, k, v, dout, zeros, zeros, tiles, **options)
        np.testing.assert_allclose(lse[name], lse["mosaic_gpu"], rtol=2e-6)
        for gradient, x in grads[name]._asdict().items():
            first = getattr(grads["mosaic_gpu"], gradient)
            np.testing.assert_array_equal(x, first, err_msg=f"{name}, {gradient}")


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_errors_at_64k_tokens_match_xla(dim):
    """Compared with XLA in fp32, each head's error is at most 1.5 times that of XLA in bf16."""
    rng, size, index = _long(dim)
    inputs = cases.qkv_dout(rng, size, "bfloat16")
    exact = _value_and_gradients(*(x.astype(jnp.float32) for x in inputs), index, backend="xla")

    def errors(backend: str) -> dict[str, np.ndarray]:
        results = _value_and_gradients(*inputs, index, backend=backend)
        return {name: _by_head(x - exact[name]) for name, x in results.items()}

    ours, theirs = errors("mosaic_gpu"), errors("xla")
    for name in exact:
        allowed = 1.5 * theirs[name] + 1e-5 * _by_head(exact[name])
        assert (ours[name] <= allowed).all(), f"{name}: {ours[name]}, allowed {allowed}"


def _by_head(x: jax.Array) -> np.ndarray:
    """Root mean square of [B, S, H, D] over tokens and dims."""
    return np.asarray(jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=(1, 3))))


@pytest.mark.parametrize(
    ("dim", "heads", "dtype"),
    [(64, 7, "float16"), (128, 6, "bfloat16"), (192, 6, "float16"), (256, 6, "bfloat16")],
)
def test_matches_the_oracle_at_8k_tokens(dim, heads, dtype):
    rng = np.random.default_rng(dim)
    size = Size(1, heads, 1, query_blocks=64, key_blocks=64, block_size=128, dim=dim)
    index = cases.vertical_slash(rng, size, max_slashes=8, max_verticals=500, garbage=rng)
    inputs = cases.qkv_dout(rng, size, dtype)
    expected = oracle(*inputs, index.to_mask(size.seq_len))
    actual = _value_and_gradients(*inputs, index, backend="mosaic_gpu")
    compare_on_device(actual, expected)


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("around", ["vmap", "scan"])
def test_calls_together_are_bit_identical_to_separate_ones(around, lists):
    rng = np.random.default_rng(0)
    size = Size(3, 4, 2, query_blocks=8, key_blocks=8, block_size=128, dim=64)
    if lists:
        index = cases.block_sparse(rng, size, causal=True, garbage=rng)
    else:
        index = cases.vertical_slash(rng, size, max_slashes=3, max_verticals=150, garbage=rng)
    inputs = *cases.qkv_dout(rng, size, "bfloat16"), index
    run = functools.partial(_value_and_gradients, backend="mosaic_gpu")
    # An axis of 3 before a batch of 1.
    stacked = jax.tree.map(lambda x: x[:, None], inputs)
    _fill_free_memory_with_nan(list(stacked[:4]))
    if around == "vmap":
        together = jax.jit(jax.vmap(run))(*stacked)
    else:
        scanned = jax.jit(lambda *x: jax.lax.scan(lambda _, x: (None, run(*x)), None, x)[1])
        together = scanned(*stacked)
    for entry in range(3):
        alone = run(*jax.tree.map(lambda x, at=entry: x[at : at + 1], inputs))
        assert_same_bits(alone, {name: x[entry] for name, x in together.items()})


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_a_hundred_random_masks(dim):
    """Compared with the oracle, in memory full of NaN, and bit-identical twice."""
    rng = np.random.default_rng(1000 + dim)
    size = Size(1, 8, 2, query_blocks=16, key_blocks=16, block_size=128, dim=dim)
    for _ in range(100):
        index = cases.vertical_slash(rng, size, max_slashes=5, max_verticals=150, garbage=rng)
        inputs = cases.qkv_dout(rng, size, "bfloat16")
        first = _value_and_gradients(*inputs, index, backend="mosaic_gpu")
        like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in first.values()]
        first = {name: np.asarray(x) for name, x in first.items()}
        _fill_free_memory_with_nan(like)
        actual = _value_and_gradients(*inputs, index, backend="mosaic_gpu")
        assert_same_bits(first, actual)
        expected = oracle(*inputs, index.to_mask(size.seq_len))
        compare_on_device(actual, expected)


def _fill_free_memory_with_nan(like: list[jax.ShapeDtypeStruct]) -> None:
    """Frees NaN arrays of the given and other sizes, which the next results will reuse."""
    dtypes = [x.dtype for x in like] + [jnp.float32] * len(like)
    poison = [jnp.full(x.shape, jnp.nan, d) for x, d in zip(2 * like, dtypes, strict=True)]
    poison.append(jnp.full(2**26, jnp.nan, jnp.float32))
    jax.block_until_ready(poison)
