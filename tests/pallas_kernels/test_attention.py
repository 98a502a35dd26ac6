"""What does not depend on the backend: merging, dispatch, and errors that name their argument."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import BlockSparseIndex, DiagonalTiles, Partial, VerticalSlashIndex

B, S, HQ, HK, D, G = 1, 32, 4, 2, 8, 8


def _qkv():
    q = jnp.ones((B, S, HQ, D))
    k = jnp.ones((B, S, HK, D))
    return q, k, k


def _tiles(**changes) -> DiagonalTiles:
    return dataclasses.replace(DiagonalTiles.full(B, HQ, S // G, S // G, G, True), **changes)


def _columns():
    index = VerticalSlashIndex(
        jnp.zeros((B, HQ, 1), jnp.int32), jnp.zeros((B, HQ), jnp.int32),
        jnp.full((B, HQ, 3), 5, jnp.int32), jnp.ones((B, HQ), jnp.int32), G,
    )
    x = jnp.zeros((B, 128, HQ, D))
    return pallas_kernels.vertical_columns(index, x, x, jnp.arange(S // G), S // G)


def test_merge_weighs_by_the_sums_of_exponentials():
    rng = np.random.default_rng(0)
    logits, values = rng.standard_normal((2, 7)), rng.standard_normal((7, D))
    empty = Partial(np.zeros((1, 2, 1, D)), np.full((1, 1, 2), -np.inf))

    def partial(keys: slice) -> Partial:
        weights = np.exp(logits[:, keys])
        out = weights @ values[keys] / weights.sum(-1, keepdims=True)
        return Partial(out[None, :, None], np.log(weights.sum(-1))[None, None])

    whole, merged = partial(slice(None)), partial(slice(0, 2))
    for part in (empty, partial(slice(2, 3)), partial(slice(3, 7))):
        merged = pallas_kernels.merge(
            Partial(*(jnp.asarray(x, jnp.float32) for x in merged)),
            Partial(*(jnp.asarray(x, jnp.float32) for x in part)),
        )
    np.testing.assert_allclose(merged.out, whole.out, atol=1e-6)
    np.testing.assert_allclose(merged.lse, whole.lse, atol=1e-6)
    both = pallas_kernels.merge(*[Partial(*(jnp.asarray(x) for x in empty))] * 2)
    assert (np.asarray(both.out) == 0).all() and (np.asarray(both.lse) == -np.inf).all()


def test_delta_sums_over_the_head_dim_in_fp32():
    rng = np.random.default_rng(1)
    out, dout = (jnp.asarray(rng.standard_normal((2, 5, 3, 8)), jnp.bfloat16) for _ in range(2))
    delta = pallas_kernels.delta_of(out, dout)
    assert delta.shape == (2, 3, 5) and delta.dtype == jnp.float32
    expected = np.einsum("bshd,bshd->bhs", *(np.asarray(x, np.float64) for x in (out, dout)))
    np.testing.assert_allclose(delta, expected, rtol=1e-5, atol=1e-5)


def test_backend_by_name_or_the_best_there_is():
    q, k, v = _qkv()
    named = pallas_kernels.dense_attention(q, k, v, block_size=G, backend="xla")
    for choice in (None, "auto"):
        chosen = pallas_kernels.dense_attention(q, k, v, block_size=G, backend=choice)
        np.testing.assert_array_equal(chosen, named)
    with pytest.raises(ValueError, match="backend='cudnn' is not one of"):
        pallas_kernels.dense_attention(q, k, v, block_size=G, backend="cudnn")


def test_a_backend_that_cannot_run_here_is_an_error_only_by_name():
    q, k, v = (jnp.ones((1, 128, 1, 64), jnp.bfloat16) for _ in range(3))
    with pytest.raises(ValueError, match="backend='mosaic_gpu' cannot run here: no GPU"):
        jax.eval_shape(
            functools.partial(pallas_kernels.dense_attention, backend="mosaic_gpu"), q, k, v
        )
    jax.eval_shape(pallas_kernels.dense_attention, q, k, v)


def test_output_dtype_follows_the_queries_the_running_result_or_the_caller():
    def dtype_of(**options):
        q, k, v = (x.astype(jnp.bfloat16) for x in _qkv())
        out, lse = jax.eval_shape(
            lambda q, k, v: pallas_kernels.forward(q, k, v, _tiles(), **options), q, k, v
        )
        assert lse.dtype == jnp.float32
        return out.dtype

    init = (jnp.zeros((B, S, HQ, D)), jnp.full((B, HQ, S), -jnp.inf))
    assert dtype_of() == jnp.bfloat16
    assert dtype_of(init=init) == jnp.float32
    assert dtype_of(init=init, out_dtype="bfloat16") == jnp.bfloat16
    assert dtype_of(out_dtype=jnp.float32) == jnp.float32


def _zeros(*shape):
    return jnp.zeros(shape, jnp.float32)


def _block_index() -> BlockSparseIndex:
    return BlockSparseIndex.from_block_mask(jnp.ones((B, HQ, S // G, S // G), bool), G)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": _zeros(S, HQ, D)}, r"q has shape \(32, 4, 8\)"),
        ({"v": _zeros(B, S, HK, 2 * D)}, r"k has shape .* and v \(1, 32, 2, 16\)"),
        ({"q": _zeros(2, S, HQ, D)}, "batch and head dim must be equal"),
        ({"q": _zeros(B, S, 3, D)}, "q has 3 heads and k 2"),
        ({"q": _zeros(B, S + 1, HQ, D)}, "q has 33 tokens: a multiple of block_size=8"),
        ({"tiles": None}, "neither tiles nor verticals"),
        ({"q": _zeros(B, S, HK, D)}, r"tiles.start has shape \(1, 4\): \(1, 2\) is needed"),
        ({"tiles": _tiles(stop=jnp.zeros((HQ,), jnp.int32))}, "tiles.stop has shape"),
        ({"tiles": _tiles(offsets=jnp.zeros((B, HQ, 0), jnp.int32))}, "at least one entry"),
        ({"tiles": _tiles(offsets=jnp.zeros((B, 1, 4), jnp.int32))}, "tiles.offsets has shape"),
        (
            {"tiles": _block_index(), "q": _zeros(B, 2 * S, HQ, D)},
            r"tiles.key_count has shape \(1, 4, 4\): \(1, 4, 8\) is needed",
        ),
        (
            {"tiles": _block_index(), "k": _zeros(B, G, HK, D), "v": _zeros(B, G, HK, D)},
            "tiles.query_count has shape",
        ),
        (
            {"verticals": dataclasses.replace(_columns(), block_size=4)},
            "verticals.block_size=4 is not that of the tiles, 8",
        ),
        (
            {"verticals": dataclasses.replace(_columns(), k=_zeros(B, 128, HK, D))},
            "verticals.k has shape",
        ),
        (
            {"verticals": dataclasses.replace(_columns(), tokens=jnp.zeros((B, HQ, 100)))},
            "100 columns: a positive multiple of 128",
        ),
        (
            {"verticals": dataclasses.replace(_columns(), query_blocks=jnp.arange(2))},
            "verticals.query_blocks has shape",
        ),
    ],
)
def test_calls_that_do_not_fit_name_the_argument(changes, message):
    call = dict(zip(("q", "k", "v"), _qkv(), strict=True)) | {"tiles": _tiles()} | changes
    with pytest.raises(ValueError, match=message):
        pallas_kernels.forward(**call, backend="xla")


def test_running_results_and_gradients_that_do_not_fit_name_the_argument():
    q, k, v = _qkv()
    stats = _zeros(B, HQ, S)
    with pytest.raises(ValueError, match="init's output has shape"):
        pallas_kernels.forward(q, k, v, _tiles(), init=(q[:, :G], stats))
    with pytest.raises(ValueError, match=r"init's lse has shape \(1, 32, 4\): \(1, 4, 32\)"):
        pallas_kernels.forward(q, k, v, _tiles(), init=(q, stats.swapaxes(1, 2)))
    with pytest.raises(ValueError, match="dout has shape"):
        pallas_kernels.backward(q, k, v, k, stats, stats, _tiles())
    with pytest.raises(ValueError, match="lse has shape"):
        pallas_kernels.backward(q, k, v, q, stats[..., 0], stats, _tiles())
    with pytest.raises(ValueError, match="delta has shape"):
        pallas_kernels.backward(q, k, v, q, stats, stats[..., 0], _tiles())
    with pytest.raises(ValueError, match="key_dtype needs tiles"):
        pallas_kernels.backward(q, k, v, q, stats, stats, None, _columns(), key_dtype=q.dtype)


def test_indices_that_do_not_fit_name_the_argument():
    q, k, v = _qkv()
    index = VerticalSlashIndex.dense(B, HQ, S, G)
    with pytest.raises(ValueError, match="q has 32 tokens and k 16"):
        pallas_kernels.vertical_slash_attention(q, k[:, :16], v[:, :16], index)
    with pytest.raises(ValueError, match=r"index.slash_count has shape \(1, 2\): \(1, 4\)"):
        pallas_kernels.vertical_slash_attention(q, k, v, VerticalSlashIndex.dense(B, HK, S, G))
    with pytest.raises(ValueError, match="as many queries as keys, not 32 and 16"):
        pallas_kernels.dense_attention(q, k[:, :16], v[:, :16], block_size=G)
