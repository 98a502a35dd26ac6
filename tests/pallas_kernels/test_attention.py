"""Backend-independent behavior: dispatch, and errors that name their argument."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import (
    BlockMaskIndex,
    BlockSparseIndex,
    DenseIndex,
    DiagonalTiles,
    ListedTiles,
    VerticalSlashIndex,
    attention,
    head_loop,
)
from pallas_kernels.head_loop import num_head_chunks
from pallas_kernels.index import Segment
from tests.pallas_kernels.helpers import cases

B, S, HQ, HK, D, G = 1, 32, 4, 2, 8, 8


def _qkv():
    q = jnp.ones((B, S, HQ, D))
    k = jnp.ones((B, S, HK, D))
    return q, k, k


def _tiles(**changes) -> DiagonalTiles:
    return dataclasses.replace(DiagonalTiles.full(B, HQ, S // G, S // G, G, True), **changes)


def _columns():
    index = VerticalSlashIndex(
        jnp.zeros((B, HQ, 1), jnp.int32),
        jnp.zeros((B, HQ), jnp.int32),
        jnp.full((B, HQ, 3), 5, jnp.int32),
        jnp.ones((B, HQ), jnp.int32),
        G,
    )
    return index.columns(Segment(0, 1, S // G), S // G)


def test_delta_sums_over_the_head_dim_in_fp32():
    rng = np.random.default_rng(1)
    out, dout = (jnp.asarray(rng.standard_normal((2, 5, 3, 8)), jnp.bfloat16) for _ in range(2))
    delta = pallas_kernels.delta_of(out, dout)
    assert delta.shape == (2, 3, 5) and delta.dtype == jnp.float32
    expected = np.einsum("bshd,bshd->bhs", *(np.asarray(x, np.float64) for x in (out, dout)))
    np.testing.assert_allclose(delta, expected, rtol=1e-5, atol=1e-5)


def test_backend_by_name_or_the_best_available():
    q, k, v = _qkv()
    dense = DenseIndex(G)
    named = pallas_kernels.attention(q, k, v, dense, backend="xla")
    for choice in (None, "auto"):
        chosen = pallas_kernels.attention(q, k, v, dense, backend=choice)
        np.testing.assert_array_equal(chosen, named)
    with pytest.raises(ValueError, match="unknown backend='cudnn'; choose from"):
        pallas_kernels.attention(q, k, v, dense, backend="cudnn")


def test_an_unavailable_backend_is_an_error_only_if_requested_by_name():
    q, k, v = (jnp.ones((1, 128, 1, 64), jnp.bfloat16) for _ in range(3))
    with pytest.raises(ValueError, match="backend='mosaic_gpu' cannot run here: no GPU"):
        jax.eval_shape(
            functools.partial(
                pallas_kernels.attention, index=DenseIndex(128), backend="mosaic_gpu"
            ),
            q,
            k,
            v,
        )
    jax.eval_shape(functools.partial(pallas_kernels.attention, index=DenseIndex(128)), q, k, v)


def test_output_dtype_follows_the_queries_the_running_result_or_the_caller():
    def dtype_of(**options):
        q, k, v = (x.astype(jnp.bfloat16) for x in _qkv())
        out, lse = jax.eval_shape(
            lambda q, k, v: pallas_kernels.forward(
                q, k, v, pallas_kernels.plan(q, k, _tiles()), **options
            ),
            q,
            k,
            v,
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


def _listed() -> ListedTiles:
    mask = jnp.ones((B, HQ, S // G, S // G), bool)
    return BlockSparseIndex.from_block_mask(mask, G).tiles()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda: {"q": _zeros(S, HQ, D)}, r"q has shape \(32, 4, 8\)"),
        (lambda: {"q": _zeros(2, S, HQ, D)}, "batch and head dim must be equal"),
        (lambda: {"q": _zeros(B, S, 3, D)}, "q has 3 heads and k has 2"),
        (lambda: {"q": _zeros(B, S + 1, HQ, D)}, "q has 33 tokens; .* multiple of block_size=8"),
        (lambda: {"tiles": None}, "pass tiles, columns or both"),
        (lambda: {"q": _zeros(B, S, HK, D)}, r"tiles.start has shape \(1, 4\); expected \(1, 2\)"),
        (lambda: {"tiles": _tiles(stop=jnp.zeros((HQ,), jnp.int32))}, "tiles.stop has shape"),
        (lambda: {"tiles": _tiles(offsets=jnp.zeros((B, HQ, 0), jnp.int32))}, "at least one entry"),
        (
            lambda: {"tiles": _tiles(offsets=jnp.zeros((B, 1, 4), jnp.int32))},
            "tiles.offsets has shape",
        ),
        (
            lambda: {"tiles": _listed(), "q": _zeros(B, 2 * S, HQ, D)},
            r"tiles.key_count has shape \(1, 4, 4\); expected \(1, 4, 8\)",
        ),
        (lambda: {"tiles": _listed(), "k": _zeros(B, G, HK, D)}, "tiles.query_count has shape"),
        (
            lambda: {"columns": dataclasses.replace(_columns(), block_size=4)},
            "columns.block_size=4 differs from the tiles' block_size=8",
        ),
        (
            lambda: {"columns": dataclasses.replace(_columns(), keep=jnp.zeros((B, HQ, 2, 4)))},
            "columns.keep has shape",
        ),
        (
            lambda: {"columns": dataclasses.replace(_columns(), tokens=jnp.zeros((B, HQ, 100)))},
            "100 columns; expected a positive multiple of 128",
        ),
        (
            lambda: {"columns": dataclasses.replace(_columns(), query_blocks=jnp.arange(2))},
            "columns.query_blocks has shape",
        ),
    ],
)
def test_invalid_calls_name_the_argument(changes, message):
    # Functions, since otherwise every process that collects tests would compute the arrays.
    call = dict(zip(("q", "k"), _qkv()[:2], strict=True)) | {"tiles": _tiles()} | changes()
    with pytest.raises(ValueError, match=message):
        pallas_kernels.plan(**call, backend="xla")


def test_arrays_that_do_not_match_the_plan_name_the_argument():
    q, k, v = _qkv()
    plan = pallas_kernels.plan(q, k, _tiles())
    for name, changes in (("q", {"q": q[:, :G]}), ("k", {"k": k[:1, :, :1]}), ("v", {"v": q})):
        arrays = {"q": q, "k": k, "v": v} | changes
        with pytest.raises(ValueError, match=f"{name} has shape .*, but the plan is for"):
            pallas_kernels.forward(**arrays, plan=plan)
    gathered = _zeros(B, 128, HQ, D)
    with pytest.raises(ValueError, match="a column_kv was passed to a plan without columns"):
        pallas_kernels.forward(q, k, v, plan, (gathered, gathered))
    plan = pallas_kernels.plan(q, k, _tiles(), _columns())
    with pytest.raises(ValueError, match="no column_kv was passed to a plan with columns"):
        pallas_kernels.forward(q, k, v, plan)
    with pytest.raises(ValueError, match=r"column_kv: values have shape \(1, 128, 2, 8\)"):
        pallas_kernels.forward(q, k, v, plan, (gathered, _zeros(B, 128, HK, D)))


def test_invalid_running_results_and_gradients_name_the_argument():
    q, k, v = _qkv()
    stats = _zeros(B, HQ, S)
    plan = pallas_kernels.plan(q, k, _tiles())
    with pytest.raises(ValueError, match="init's output has shape"):
        pallas_kernels.forward(q, k, v, plan, init=(q[:, :G], stats))
    with pytest.raises(ValueError, match=r"init's lse has shape \(1, 32, 4\); .* \(1, 4, 32\)"):
        pallas_kernels.forward(q, k, v, plan, init=(q, stats.swapaxes(1, 2)))
    with pytest.raises(ValueError, match="dout has shape"):
        pallas_kernels.backward(q, k, v, k, stats, stats, plan)
    with pytest.raises(ValueError, match="lse has shape"):
        pallas_kernels.backward(q, k, v, q, stats[..., 0], stats, plan)
    with pytest.raises(ValueError, match="delta has shape"):
        pallas_kernels.backward(q, k, v, q, stats, stats[..., 0], plan)
    columns = pallas_kernels.plan(q, k, None, _columns())
    column_kv = 2 * (_zeros(B, 128, HQ, D),)
    with pytest.raises(ValueError, match="key_dtype needs tiles"):
        pallas_kernels.backward(q, k, v, q, stats, stats, columns, column_kv, key_dtype=q.dtype)


def test_invalid_indices_name_the_argument():
    q, k, v = _qkv()
    index = cases.every_diagonal(B, HQ, S, G)
    with pytest.raises(ValueError, match="index is a list; it must be a TiledIndex, a Token"):
        pallas_kernels.attention(q, k, v, [1])
    unequal = "q has 32 tokens and k has 16; causal attention needs equal lengths"
    for causal in (index, DenseIndex(G)):
        with pytest.raises(ValueError, match=unequal):
            pallas_kernels.attention(q, k[:, :16], v[:, :16], causal)
    with pytest.raises(ValueError, match=r"index.slash_count has shape \(1, 2\); .* \(1, 4\)"):
        pallas_kernels.attention(q, k, v, cases.every_diagonal(B, HK, S, G))
    with pytest.raises(ValueError, match=r"k has shape .* and v has \(1, 32, 2, 16\)"):
        pallas_kernels.attention(q, k, _zeros(B, S, HK, 2 * D), index)


def test_a_plan_serves_both_passes_and_passes_through_transformations():
    """Both passes share it; it is data, so one compiled program accepts any plan of its shape."""
    q, k, v = _qkv()
    tiles = _tiles()
    fewer = dataclasses.replace(tiles, stop=tiles.stop - 2)
    run = jax.jit(pallas_kernels.forward)
    for wanted in (tiles, fewer):
        plan = pallas_kernels.plan(q, k, wanted, backend="xla")
        assert plan.backend == "xla"
        out, lse = run(q, k, v, plan)
        rows = np.exp(np.asarray(lse) - D**0.5)  # all logits are equal
        blocks = np.minimum(np.arange(S) // G, int(wanted.stop[0, 0]) - 1)
        np.testing.assert_allclose(rows[0, 0], blocks * G + np.arange(S) % G + 1, rtol=1e-5)
    assert run._cache_size() == 1


@pytest.mark.parametrize(
    ("heads", "gathered", "pairs", "parts"),
    [
        ((32, 8), 0, 0, 1),
        ((32, 8), 2**33, 0, 2),
        ((32, 8), 2**33 + 1, 0, 4),
        ((32, 8), 0, 2**26, 4),  # two int32 lists for each query head
        ((32, 8), 2**40, 0, 8),
        ((28, 4), 2**40, 0, 2),  # not 4: an even number of query heads each
        ((28, 4), 2**40, 1, 4),
        ((3, 3), 2**40, 0, 1),
    ],
)
def test_heads_are_divided_by_size(heads, gathered, pairs, parts):
    assert num_head_chunks(*heads, gathered, pairs) == parts


def test_heads_one_after_another_give_equal_results(monkeypatch):
    rng = np.random.default_rng(0)
    mask = jnp.asarray(rng.random((2, 4, 6, 6)) < 0.5)
    index = BlockMaskIndex.from_block_mask(mask, 16)
    shapes = [(2, 96, heads, 16) for heads in (4, 2, 2, 4)]
    q, k, v, dout = (jnp.asarray(rng.standard_normal(x), jnp.float32) for x in shapes)

    def results():
        run = functools.partial(attention, index=index, return_lse=True)
        out, vjp = jax.vjp(run, q, k, v)
        return *out, *vjp((dout, jnp.ones_like(out[1])))

    together = jax.jit(results)()
    monkeypatch.setattr(head_loop, "_PART_BYTES", 1)
    in_parts = jax.jit(lambda: results()).trace()
    assert "length=2" in str(in_parts.jaxpr)
    for x, y in zip(in_parts.lower().compile()(), together, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)  # XLA rounds differently in a loop
