"""`inspect`: metrics against the mask of an index, and pictures."""

import functools
import sys

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

from mtraining_jax import Layout, MoBA, VerticalSlash, inspect, stripe
from mtraining_jax.tools.audit.picture import block_shares
from pallas_kernels.index import BlockSparseIndex, DenseIndex, VerticalSlashIndex
from tests.attention.inputs import BLOCK, HEADS, KV_HEADS, PATTERN, TOKENS, inputs, with_residuals

CAUSAL = np.tri(TOKENS, dtype=bool)


@functools.cache
def chosen():
    """An index, and its mask [B, Hq, S, S]."""
    attend = functools.partial(with_residuals, pattern=PATTERN)
    *_, index = jax.jit(attend)(*inputs())
    return index, np.asarray(index.to_mask(TOKENS))


def listed():
    """Block lists, different for each head."""
    mask = np.random.default_rng(0).random((1, HEADS, TOKENS // BLOCK, TOKENS // BLOCK)) < 0.3
    return BlockSparseIndex.from_block_mask(jnp.asarray(mask), BLOCK)


def test_block_lists_and_dense_indices_can_be_inspected(tmp_path):
    mask = np.asarray(listed().to_mask(TOKENS))
    q, k, _ = (x[:1] for x in inputs())
    found = inspect(listed(), q, k, rows=8)
    np.testing.assert_array_equal(found.pairs, mask.sum((-1, -2)))
    assert list(found.budgets) == ["blocks"] and found.recall.shape == (1, HEADS)
    assert "blocks" in str(found)
    shares = block_shares(listed(), TOKENS, 0, 1)
    blocks = mask[0, 1].reshape(TOKENS // BLOCK, BLOCK, -1, BLOCK).sum((1, 3))
    whole = CAUSAL.reshape(TOKENS // BLOCK, BLOCK, -1, BLOCK).sum((1, 3))
    np.testing.assert_allclose(shares, np.where(whole > 0, blocks / np.maximum(whole, 1), np.nan))
    found.save_picture(tmp_path / "lists.png", heads=(0, 1))
    dense = inspect(DenseIndex(BLOCK), q, k, rows=8)
    assert dense.density.shape == (1, HEADS) and (dense.density == 1).all()
    np.testing.assert_allclose(dense.recall, 1, rtol=1e-6)


def sparse_by_hand():
    """An index without the main diagonal, as the paper's preset may select."""
    return VerticalSlashIndex(
        slash_blocks=jnp.array([[[1, 3, 16]]], jnp.int32),
        slash_count=jnp.array([[2]], jnp.int32),
        vertical_tokens=jnp.array([[[0, 7, 9, TOKENS]]], jnp.int32),
        vertical_count=jnp.array([[3]], jnp.int32),
        block_size=BLOCK,
    )


def test_density_and_budgets_match_the_mask():
    index, mask = chosen()
    with jax.numpy_dtype_promotion("strict"):
        found = inspect(index)
    assert found.seq_len == TOKENS
    np.testing.assert_allclose(found.density, mask.sum((-1, -2)) / CAUSAL.sum(), rtol=1e-6)
    np.testing.assert_array_equal(found.pairs, mask.sum((-1, -2)))
    np.testing.assert_array_equal(found.budgets["columns"], index.vertical_count)
    np.testing.assert_array_equal(found.budgets["diagonals"], index.slash_count)
    assert (found.executed >= found.density).all()
    assert found.recall is None and found.rows is None
    lines = str(found).splitlines()
    assert f"{TOKENS} tokens" in lines[0] and len(lines) == 2 + 2 * HEADS
    assert lines[-1].split()[:2] == ["1", str(HEADS - 1)] and len(lines[-1].split()) == 6


@pytest.mark.parametrize("layout", [None, Layout("striped", TOKENS, 4, BLOCK)])
def test_recall_is_the_softmax_mass_on_the_mask(layout):
    index, mask = chosen()
    q, k, _ = inputs()
    rows = [3, 50, 127]
    logits = jnp.einsum("bqhd,bkhd->bhqk", q[:, rows], jnp.repeat(k, HEADS // KV_HEADS, axis=2))
    weights = jax.nn.softmax(jnp.where(CAUSAL[rows], 0.5 * logits, -jnp.inf), axis=-1)
    wanted = (weights * mask[:, :, rows]).sum(-1).mean(-1)
    if layout is not None:
        q, k = stripe((q, k), layout)
    found = inspect(index, q, k, rows=rows, scale=0.5, layout=layout, seq_len=TOKENS)
    np.testing.assert_allclose(found.recall, wanted, rtol=1e-5)
    assert 0.1 < found.recall.mean() < 0.999
    assert "recall" in str(found)


def test_rows_are_sampled_evenly_and_reproducibly():
    index, _ = chosen()
    q, k, _ = inputs()
    rows = [inspect(index, q, k, rows=8, seed=seed).rows for seed in (0, 0, 1)]
    assert (rows[0] == rows[1]).all() and (rows[0] != rows[2]).any()
    assert (rows[0] // (TOKENS // 8) == np.arange(8)).all()


def token_chunks():
    """A selection of MoBA, where each token has its own keys."""
    q, k, v = inputs()
    pattern = MoBA(chunk_size=2 * BLOCK, top_k=3, block_size=BLOCK)
    return jax.jit(functools.partial(with_residuals, pattern=pattern))(q, k, v)[2]


@pytest.mark.parametrize("index", [lambda: chosen()[0], listed, token_chunks])
def test_masks_of_tokens_and_blocks(index):
    index = index()
    wanted = np.asarray(index.to_mask(TOKENS))
    found = inspect(index, seq_len=TOKENS)
    batch, head = (size - 1 for size in wanted.shape[:2])
    mask = found.token_mask(batch, head)
    assert mask.dtype == bool
    np.testing.assert_array_equal(mask, wanted[batch, head])
    blocks = mask.reshape(TOKENS // BLOCK, BLOCK, -1, BLOCK).any((1, 3))
    np.testing.assert_array_equal(found.block_mask(batch, head), blocks)
    with pytest.raises(ValueError, match=f"head={head + 1} must be in 0 .. {head}"):
        found.block_mask(head=head + 1)


@pytest.mark.parametrize("index", [sparse_by_hand, token_chunks])
def test_a_pixel_is_the_density_of_its_block(index):
    index = index()
    mask = np.asarray(index.to_mask(TOKENS))[0, 0]
    blocks = TOKENS // BLOCK
    counts, possible = (x.reshape(blocks, BLOCK, blocks, BLOCK).sum((1, 3)) for x in (mask, CAUSAL))
    shares = block_shares(index, TOKENS, 0, 0)
    assert (np.isnan(shares) == (possible == 0)).all()
    np.testing.assert_allclose(
        shares[possible > 0], (counts / np.maximum(possible, 1))[possible > 0], rtol=1e-6
    )


def test_pictures_differ_between_indices(tmp_path):
    index, _ = chosen()
    one, other = tmp_path / "sparse.png", tmp_path / "dense.png"
    inspect(index).save_picture(one, heads=(0, 3), batch=1)
    inspect(DenseIndex(BLOCK), *inputs()[:2]).save_picture(str(other), heads=(0, 3))
    assert one.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    sparse_image, dense_image = (matplotlib.image.imread(path) for path in (one, other))
    assert sparse_image.shape == dense_image.shape
    assert sparse_image.mean() > dense_image.mean()  # fewer dark pixels


def test_long_sequences_are_downsampled(tmp_path):
    blocks = 1100
    index = VerticalSlashIndex(
        slash_blocks=jnp.array([[[0, 500]]], jnp.int32),
        slash_count=jnp.array([[2]], jnp.int32),
        vertical_tokens=jnp.array([[[5]]], jnp.int32),
        vertical_count=jnp.array([[1]], jnp.int32),
        block_size=128,
    )
    inspect(index, seq_len=128 * blocks).save_picture(tmp_path / "long.png")
    assert (tmp_path / "long.png").stat().st_size > 1000


def test_pictures_without_matplotlib_name_the_package_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        inspect(chosen()[0]).save_picture(tmp_path / "x.png")


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        (("pattern",), {}, "index is a VerticalSlash; pass an index"),
        (("index", "q"), {}, "pass both q and k to measure recall"),
        (("index", "k", "q"), {}, "q has 3 heads; .* multiple of the 6 heads of k"),
        (("listed", "q", "k"), {}, "q has shape .*; .* as in the index"),
        (("index", "q", "k"), {"seq_len": 64}, "seq_len=64 but q has 128 tokens"),
        (("index",), {"seq_len": 100}, "seq_len=100 must be a multiple of the index's block_size"),
        (("index",), {"seq_len": "a"}, "seq_len='a' must be a multiple of"),
        (("dense",), {}, "seq_len is needed"),
        (("index", "q", "k"), {"layout": "striped"}, "layout is a str; it must be a Layout"),
        (("index", "q", "k"), {"documents": 1}, "documents is a int; it must be a Documents"),
        (("index", "q", "k"), {"scale": "a"}, "scale='a' must be a positive number"),
        (("index", "q", "k"), {"rows": 0}, "rows=0 must be at least 1"),
        (("index", "q", "k"), {"seed": -1}, "seed=-1 must be an integer, at least 0"),
        (("index", "q", "k"), {"rows": [128]}, "rows=.128. must be positions in 0 .. 127"),
        (("index", "q", "k"), {"layout": Layout("striped", 64, 2, 8)}, "layout has seq_len=64"),
    ],
)
def test_invalid_arguments_raise(arguments, options, sentence):
    q, k, _ = inputs()
    there = {
        "index": chosen()[0],
        "q": q,
        "k": k,
        "pattern": VerticalSlash(),
        "listed": listed(),
        "dense": DenseIndex(BLOCK),
    }
    with pytest.raises(ValueError, match=sentence):
        inspect(*(there[name] for name in arguments), **options)


@pytest.mark.parametrize(
    ("path", "options", "sentence"),
    [
        ("mask.pdf", {}, "must end in .png"),
        ("mask.png", {"batch": 2}, "batch=2 must be in 0 .. 1"),
        ("mask.png", {"heads": [6]}, "head=6 must be in 0 .. 5"),
        ("mask.png", {"heads": []}, "heads=.. must be a list of one or more heads"),
        ("mask.png", {"heads": 0}, "heads=0 must be a list of one or more heads"),
    ],
)
def test_invalid_picture_arguments_raise(tmp_path, path, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        inspect(chosen()[0]).save_picture(tmp_path / path, **options)


def test_traced_indices_raise():
    with pytest.raises(ValueError, match="index, q and k are traced"):
        jax.eval_shape(lambda index: inspect(index).density, chosen()[0])
