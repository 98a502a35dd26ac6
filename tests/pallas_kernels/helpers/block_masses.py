"""Checks of kernels that score key blocks, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.masses import BlockScores


def expected(q, k, places, scale, first_blocks=None):
    """Expected masses [B, Hq, n, NB], in fp64."""
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
    """The products with weight 1, [B, Hq, n, r] in fp64."""
    group = q.shape[1] // k.shape[1]
    q, k = (np.asarray(x, np.float64) for x in (q, np.repeat(k, group, axis=1)))
    k = k.reshape(*k.shape[:2], -1, k.shape[-1])
    products = np.einsum("bhnre,bhme->bhnrm", q, k)
    seen = places[:, None, ..., None] >= np.arange(k.shape[2])
    products = np.where(seen, products, -np.inf)
    peak = np.maximum(products.max(-1), -1e9)
    total = np.exp((products - peak[..., None]) * scale).sum(-1)
    return peak + np.log(np.where(total > 0, total, 1)) / scale


def check_masses(
    kernels: BlockScores, blocks: int, rows: int, columns: int, length: int, first: int
) -> None:
    """Checks masses and levels of a softmax.

    Args:
        kernels: kernels to check.
        blocks: number of query blocks.
        rows: rows per query block.
        columns: rows per key block.
        length: length of a row.
        first: number of the first query block.
    """
    rng = np.random.default_rng(0)
    num_blocks = first + blocks
    q = jnp.asarray(rng.normal(size=(1, 2, blocks, rows, length)) * 3, jnp.bfloat16)
    k = jnp.asarray(rng.normal(size=(1, 1, num_blocks, columns, length)), jnp.bfloat16)
    own = np.arange(blocks)[:, None] + first
    places = own * columns + (np.arange(rows) + 1) * columns // rows - 1
    places[-1, rows // 2 :] = -1  # padding
    scale = length**-0.5
    places = places[None]
    masses = jax.jit(functools.partial(kernels.block_masses, scale=scale, levels=True))
    found, levels = masses(q, k, jnp.asarray(places, jnp.int32))
    wanted, of_rows = expected(q, k, places, scale), levels_of(q, k, places, scale)
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=1e-7)
    seen = np.broadcast_to(places >= 0, levels.shape)
    np.testing.assert_allclose(levels[seen], of_rows[seen], rtol=1e-5, atol=1e-4)
    assert (np.asarray(found)[:, :, :, -1][:, :, : blocks - 1] == 0).all()  # after the rows
    assert kernels.unsupported(q, k) is None


def check_masses_of_documents(kernels: BlockScores) -> None:
    """Checks rows that see keys from a block on, bit-identical to the document on its own."""
    rng = np.random.default_rng(1)
    blocks, rows, columns, length = 16, 16, 128, 64
    q = jnp.asarray(rng.normal(size=(2, 1, blocks, rows, length)) * 3, jnp.bfloat16)
    k = jnp.asarray(rng.normal(size=(2, 1, blocks, columns, length)), jnp.bfloat16)
    # Documents that begin in the middle of a column tile, and some that share a row tile.
    starts = [0, 1, 7, 8, 9], [0, 5, 12]
    first = np.stack([np.repeat(x, np.diff([*x, blocks])) for x in starts])
    places = np.arange(blocks)[:, None] * columns + (np.arange(rows) + 1) * columns // rows - 1
    places = np.stack([places, places])
    places[0, 9:] = -1  # padding
    places[1, 5:12, 5:] = -1
    first[0, 9:] = blocks
    masses = jax.jit(functools.partial(kernels.block_masses, scale=length**-0.5))
    found = masses(q, k, jnp.asarray(places, jnp.int32), jnp.asarray(first, jnp.int32))
    wanted = expected(q, k, places, length**-0.5, first)
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=1e-7)
    # A document on its own is bit-identical.
    own = (places[1:, 5:12] - 5 * columns).clip(-1).astype(np.int32)
    alone = masses(q[1:, :, 5:12], k[1:, :, 5:12], own)
    np.testing.assert_array_equal(np.asarray(found)[1:, :, 5:12, 5:12], alone)
