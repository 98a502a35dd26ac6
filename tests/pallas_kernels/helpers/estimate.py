"""Checks of kernels that score key blocks by the last queries, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.interface import Estimate, ProbeCall

TILE, ROWS = 128, 64


def _logits(q, k, block_ids, end):
    """Causal logits fp64 [B, Hq, n, 64, 128], -inf after the query."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    k = np.repeat(k, q.shape[1] // k.shape[2], axis=2)
    k = k.reshape(k.shape[0], len(block_ids), TILE, *k.shape[2:])
    queries = end - ROWS + np.arange(ROWS)
    keys = block_ids[:, None] * TILE + np.arange(TILE)
    causal = keys[:, None, :] <= queries[:, None]
    return np.where(causal, np.einsum("bhud,bnkhd->bhnuk", q, k), -np.inf)


def check_sums(
    kernels: Estimate,
    heads: int,
    kv_heads: int,
    valid_len: int | None,
    *,
    dim: int = 64,
    dtype: str = "bfloat16",
) -> None:
    """Checks statistics and masses of three blocks in a sequence of six.

    Args:
        kernels: kernels to check.
        heads: query heads.
        kv_heads: key heads.
        valid_len: end of the last queries; None for the end of the sequence.
        dim: head dim.
        dtype: dtype of queries and keys.
    """
    rng = np.random.default_rng(heads)
    block_ids, num_blocks, scale = np.array([5, 0, 3], np.int32), 6, 1.6 / dim**0.5
    q = jnp.asarray(rng.normal(size=(1, heads, ROWS, dim)), dtype)
    k = jnp.asarray(rng.normal(size=(1, 3 * TILE, kv_heads, dim)), dtype)
    valid = None if valid_len is None else jnp.int32(valid_len)
    call = ProbeCall(q, k, block_ids, num_blocks, scale, valid)
    logits = _logits(q, k, block_ids, valid_len or num_blocks * TILE)

    peak, total = kernels.block_statistics(call)
    lowest = np.float64(np.finfo(np.float32).min)  # instead of -inf, where nothing is visible
    expected = np.maximum(logits.max(-1), lowest)
    # A peak near zero sums products of either sign, with rounding errors larger than the peak.
    np.testing.assert_allclose(peak, expected, rtol=1e-5, atol=2e-6)
    terms = np.exp((logits - expected[..., None]) * scale)
    np.testing.assert_allclose(total, terms.sum(-1), rtol=1e-4)

    peak = logits.max((2, 4)).astype(np.float32)
    to_mass = rng.uniform(1, 9, peak.shape).astype(np.float32)
    got = kernels.block_masses(call, peak, to_mass)
    columns, own, beyond = map(np.asarray, got)
    weights = np.exp((logits - peak[:, :, None, :, None]) * scale) * to_mass[:, :, None, :, None]
    np.testing.assert_allclose(columns, weights.sum(-2), rtol=1e-4)
    diagonals = np.zeros((1, heads, 3, 2 * TILE))
    for u in range(ROWS):
        diagonals[..., ROWS - 1 - u : ROWS - 1 - u + TILE] += weights[..., u, :]
    np.testing.assert_allclose(own, diagonals[..., :TILE], rtol=1e-4)
    np.testing.assert_allclose(beyond, diagonals[..., TILE:], rtol=1e-4)


def check_sets_of_queries(kernels: Estimate) -> None:
    """Checks blocks as sequences of one block, with separate queries and ends.

    The results must be bit-identical to calls with one query set.
    """
    rng, heads, ends, of = np.random.default_rng(7), 2, [40, 128, 300], [1, 1, 0]
    q = jnp.asarray(rng.normal(size=(2, heads, ROWS, 64)), jnp.bfloat16)
    k = jnp.asarray(rng.normal(size=(3, TILE, 1, 64)), jnp.bfloat16)
    peak, to_mass = (jnp.asarray(rng.uniform(4, 5, q.shape[:3]), jnp.float32) for _ in range(2))

    @jax.jit
    def both(q, k, peak, to_mass, **more):
        call = ProbeCall(q, k, jnp.zeros(1, jnp.int32), 1, 0.2, **more)
        return *kernels.block_statistics(call), *kernels.block_masses(call, peak, to_mass)

    more = dict(valid_len=jnp.array(ends, jnp.int32), queries=jnp.array(of, jnp.int32))
    found = both(q, k, peak, to_mass, **more)
    for n, (end, own) in enumerate(zip(ends, of, strict=True)):
        one = (x[own : own + 1] for x in (q, peak, to_mass))
        q_one, *rows = one
        alone = both(q_one, k[n : n + 1], *rows, valid_len=jnp.int32(end))
        for x, wanted in zip(found, alone, strict=True):
            np.testing.assert_array_equal(x[n], wanted[0])


def check_each_block_is_alone(kernels: Estimate) -> None:
    """Checks that a block's result is bit-identical whatever the other blocks and their order."""
    rng, num_blocks = np.random.default_rng(8), 4
    q = jnp.asarray(rng.normal(size=(2, 2, ROWS, 64)), jnp.float16)
    k = jnp.asarray(rng.normal(size=(2, num_blocks * TILE, 1, 64)), jnp.float16)
    peak, to_mass = (jnp.asarray(rng.uniform(4, 5, q.shape[:3]), jnp.float32) for _ in range(2))

    def both(k, ids):
        call = ProbeCall(q, k, jnp.asarray(ids, jnp.int32), num_blocks, 0.2)
        return *kernels.block_statistics(call), *kernels.block_masses(call, peak, to_mass)

    whole = both(k, range(num_blocks))
    blocks = k.reshape(2, num_blocks, TILE, 1, 64)
    for ids in ([2], [3, 1], [1, 0, 2, 3]):
        for x, expected in zip(
            both(blocks[:, np.array(ids)].reshape(2, -1, 1, 64), ids), whole, strict=True
        ):
            np.testing.assert_array_equal(x, expected[:, :, np.array(ids)])
