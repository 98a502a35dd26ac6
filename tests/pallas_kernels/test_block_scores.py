"""Softmax masses of key blocks by the Hopper kernel, in Pallas' interpreter, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import backends
from pallas_kernels.mosaic_gpu.block_masses import HopperBlockScores
from tests.pallas_kernels.hopper_backends import registered

WATCHED = HopperBlockScores(plgpu.InterpretGPUParams(detect_races=True))


def expected(q, k, places, scale):
    """[B, Hq, n, NB], in fp64."""
    group = q.shape[1] // k.shape[1]
    q, k = (np.asarray(x, np.float64) for x in (q, np.repeat(k, group, axis=1)))
    logits = np.einsum("bhnre,bhmce->bhnrmc", q, k) * scale
    seen = places[..., None] >= np.arange(k.shape[2] * k.shape[3])
    terms = np.where(seen.reshape(*places.shape, *k.shape[2:4]), np.exp(logits), 0.0)
    total = terms.sum((-2, -1), keepdims=True)
    return (terms / np.where(total > 0, total, 1)).sum(-1).mean(-2)


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
    found = WATCHED.block_masses(q, k, jnp.asarray(places, jnp.int32), scale=scale)
    wanted = expected(q, k, places, scale)
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=1e-7)
    assert (np.asarray(found)[:, :, :, -1][:, :, : blocks - 1] == 0).all()  # ahead of the rows
    assert WATCHED.unsupported(q, k) is None


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
