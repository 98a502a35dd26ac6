"""Softmax masses of key blocks by the Hopper kernel, in Pallas' interpreter, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import backends
from pallas_kernels.mosaic_gpu.block_masses import HopperBlockScores
from tests.pallas_kernels.hopper_backends import registered

WATCHED = HopperBlockScores(plgpu.InterpretGPUParams(detect_races=True))


def expected(q, k, places, scale, first_blocks=None):
    """[B, Hq, n, NB], in fp64."""
    group = q.shape[1] // k.shape[1]
    q, k = (np.asarray(x, np.float64) for x in (q, np.repeat(k, group, axis=1)))
    logits = np.einsum("bhnre,bhmce->bhnrmc", q, k) * scale
    numbers = np.arange(k.shape[2] * k.shape[3])
    seen = places[..., None] >= numbers  # [B, n, r, keys]
    if first_blocks is not None:
        seen = seen & (numbers >= (first_blocks * k.shape[3])[..., None, None])
    terms = np.where(seen.reshape(-1, 1, *seen.shape[1:3], *k.shape[2:4]), np.exp(logits), 0.0)
    total = terms.sum((-2, -1), keepdims=True)
    return (terms / np.where(total > 0, total, 1)).sum(-1).mean(-2)


def levels_of(q, k, places, scale):
    """The products that would have weight 1, [B, Hq, n, r] in fp64."""
    group = q.shape[1] // k.shape[1]
    q, k = (np.asarray(x, np.float64) for x in (q, np.repeat(k, group, axis=1)))
    k = k.reshape(*k.shape[:2], -1, k.shape[-1])
    products = np.einsum("bhnre,bhme->bhnrm", q, k)
    seen = places[:, None, ..., None] >= np.arange(k.shape[2])
    products = np.where(seen, products, -np.inf)
    peak = np.maximum(products.max(-1), -1e9)
    total = np.exp((products - peak[..., None]) * scale).sum(-1)
    return peak + np.log(np.where(total > 0, total, 1)) / scale


# Query blocks, their rows, rows of a key block, their length, and the first query block's number.
@pytest.mark.parametrize(
    ("blocks", "rows", "columns", "length", "first"),
    [(24, 16, 16, 256, 0), (3, 128, 128, 64, 1), (16, 12, 64, 64, 2)],
)
def test_masses_are_those_of_a_softmax(blocks, rows, columns, length, first):
    rng = np.random.default_rng(0)
    num_blocks = first + blocks
    q = jnp.asarray(rng.normal(size=(1, 2, blocks, rows, length)) * 3, jnp.bfloat16)
    k = jnp.asarray(rng.normal(size=(1, 1, num_blocks, columns, length)), jnp.bfloat16)
    own = np.arange(blocks)[:, None] + first
    places = own * columns + (np.arange(rows) + 1) * columns // rows - 1
    places[-1, rows // 2 :] = -1  # padding
    scale = length**-0.5
    places = places[None]
    found, levels = WATCHED.block_masses(
        q, k, jnp.asarray(places, jnp.int32), scale=scale, levels=True
    )
    wanted, of_rows = expected(q, k, places, scale), levels_of(q, k, places, scale)
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=1e-7)
    seen = np.broadcast_to(places >= 0, levels.shape)
    np.testing.assert_allclose(levels[seen], of_rows[seen], rtol=1e-5, atol=1e-4)
    assert (np.asarray(found)[:, :, :, -1][:, :, : blocks - 1] == 0).all()  # ahead of the rows
    assert WATCHED.unsupported(q, k) is None


def test_rows_see_no_block_before_the_first_one_of_their_document():
    rng = np.random.default_rng(1)
    blocks, rows, columns, length = 16, 16, 128, 64
    q = jnp.asarray(rng.normal(size=(2, 1, blocks, rows, length)) * 3, jnp.bfloat16)
    k = jnp.asarray(rng.normal(size=(2, 1, blocks, columns, length)), jnp.bfloat16)
    # Documents that begin in the middle of a tile of columns, and some that share a tile of rows.
    starts = [0, 1, 7, 8, 9], [0, 5, 12]
    first = np.stack([np.repeat(x, np.diff([*x, blocks])) for x in starts])
    places = np.arange(blocks)[:, None] * columns + (np.arange(rows) + 1) * columns // rows - 1
    places = np.stack([places, places])
    places[0, 9:] = -1  # padding
    places[1, 5:12, 5:] = -1
    first[0, 9:] = blocks
    found = WATCHED.block_masses(
        q, k, jnp.asarray(places, jnp.int32), jnp.asarray(first, jnp.int32), scale=length**-0.5
    )
    wanted = expected(q, k, places, length**-0.5, first)
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=1e-7)
    # A document alone: the same bits.
    alone = WATCHED.block_masses(
        q[1:, :, 5:12], k[1:, :, 5:12], jnp.asarray(places[1:, 5:12] - 5 * columns).clip(-1),
        scale=length**-0.5,
    )
    np.testing.assert_array_equal(np.asarray(found)[1:, :, 5:12, 5:12], alone)


@pytest.mark.parametrize(
    ("length", "columns", "dtype", "reason"),
    [(64, 16, "float32", "dtypes float32"), (80, 16, "bfloat16", "rows of 80 numbers"),
     (64, 4, "float16", "4 rows of keys in a block")],
)  # fmt: skip
def test_what_the_kernel_cannot_do_is_said(length, columns, dtype, reason):
    x = jnp.zeros((1, 1, 2, columns, length), dtype)
    assert WATCHED.unsupported(x, x).startswith(reason)


def test_kernels_that_cannot_run_are_left_to_xla_and_said_once(caplog):
    backend = registered("cannot score", interpret=plgpu.InterpretGPUParams())
    x = jnp.zeros((1, 128, 1, 64), jnp.bfloat16)
    rows = jnp.zeros((1, 1, 1, 4, 80), jnp.bfloat16)
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert backends.block_score_kernels(backend, x, 128, rows, rows) is None
    (record,) = caplog.records
    assert record.message.endswith("XLA backend: rows of 80 numbers (multiples of 64 are needed)")
    caplog.clear()
    with caplog.at_level("INFO"):
        for name in (backend, backend, "xla"):  # XLA has no kernels to leave
            backends.leave_estimate_to_xla(name, x, 128, f"a reason for {name}")
    (record,) = caplog.records
    assert record.message.endswith(f"XLA backend: a reason for {backend}")
