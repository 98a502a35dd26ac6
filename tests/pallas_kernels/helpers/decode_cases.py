"""Attention of new tokens to listed blocks, in float64."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode import DecodeCall

BLOCK = 128
GPU_SIZES = [  # batch, query and key/value heads, blocks, D
    (1, 12, 2, 1024, 128), (8, 12, 2, 40, 128), (1, 32, 8, 130, 128), (2, 9, 3, 65, 64),
    (3, 64, 1, 7, 64), (160, 4, 2, 3, 128),
]  # fmt: skip


def make_call(
    batch: int, heads: int, kv_heads: int, blocks: int, dim: int, seed: int = 0
) -> DecodeCall:
    """A call with lists of different lengths for key/value heads, and blocks with hidden keys.

    The list of the last head of the last sequence is empty if there are several.
    """
    rng = np.random.default_rng(seed)
    q, k, v = (
        jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
        for shape in (
            (batch, heads, dim),
            (batch, kv_heads, blocks * BLOCK, dim),
            (batch, kv_heads, blocks * BLOCK, dim),
        )
    )
    lists = rng.permuted(np.tile(np.arange(blocks), (batch, kv_heads, 1)), axis=-1)
    counts = rng.integers(1, blocks + 1, (batch, kv_heads))
    if batch * kv_heads > 1:
        counts[-1, -1] = 0
    seen = np.tile([0, BLOCK], (batch, blocks, 1))
    seen[:, 0], seen[:, blocks // 2] = (3, BLOCK), (0, 0)
    seen[:, -1, 1] = 77 - np.arange(batch) % 50  # each sequence has an end of its own
    arrays = (jnp.asarray(x, jnp.int32) for x in (lists, counts, seen))
    return DecodeCall(q, k, v, *arrays, 0.2)


def reference(call: DecodeCall) -> tuple[np.ndarray, np.ndarray]:
    """out [B, Hq, D] and lse [B, Hq], in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in call[:3])
    lists, counts, seen = (np.asarray(x) for x in call[3:6])
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for b, h in np.ndindex(lse.shape):
        kv = h // (q.shape[1] // k.shape[1])
        keys = [
            np.arange(*(block * BLOCK + seen[b, block])) for block in lists[b, kv, : counts[b, kv]]
        ]
        keys = np.concatenate([*keys, np.arange(0)]).astype(int)
        if keys.size:
            logits = k[b, kv, keys] @ q[b, h] * call.scale
            lse[b, h] = np.logaddexp.reduce(logits)
            out[b, h] = np.exp(logits - lse[b, h]) @ v[b, kv, keys]
    return out, lse


def check(found: tuple, call: DecodeCall, tolerance: float) -> None:
    """Compares a result with the reference; rows without keys must be exact."""
    out, lse = (np.asarray(x) for x in found)
    wanted, wanted_lse = reference(call)
    none = np.isneginf(wanted_lse)
    np.testing.assert_array_equal(np.isneginf(lse), none)
    np.testing.assert_allclose(lse[~none], wanted_lse[~none], atol=1e-4)
    assert not out[none].any()
    assert np.abs(out - wanted).max() <= tolerance * np.abs(wanted).max()
