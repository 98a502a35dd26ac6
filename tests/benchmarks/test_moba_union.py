"""The union of what neighbouring queries choose, by brute force."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.moba_union import shares
from mtraining_jax.sparsity import MoBA, Shards
from pallas_kernels.reference import mask_from_index
from tests.sparsity import inputs


def test_shares_are_those_of_the_masks():
    seq_len, block, chunk = 256, 8, 32
    pattern = MoBA(chunk, 3, block)
    q, k = inputs.random(0, 1, seq_len, 2, 1, 16)
    rows = jnp.arange(seq_len // block)
    index = jax.jit(lambda q, k: pattern.choose(q, k, Shards(rows, len(rows))).index)(q, k)
    mask = np.asarray(mask_from_index(index, seq_len))[0]
    found = np.asarray(jax.jit(lambda q, k: shares(pattern, q, k))(q, k))
    total = seq_len * (seq_len + 1) / 2
    own = np.arange(seq_len)[:, None] // chunk == np.arange(seq_len) // chunk
    past = (mask & ~own).reshape(2, -1, block, seq_len)
    union = np.broadcast_to(past.any(2, keepdims=True), past.shape)
    of_own = (mask & own).sum() / 2
    wanted = [
        mask.sum() / 2 / total, (union.sum() / 2 + of_own) / total, None,
        past.sum() / 2 / seq_len / chunk, past.any(2).sum() / 2 / (seq_len / block) / chunk,
    ]  # fmt: skip
    for got, want in zip(found, wanted, strict=True):
        assert want is None or abs(got - want) < 1e-5
    # Tiles: queries of a chunk rounded up to blocks, and whole blocks of the own chunk.
    queries = (past.reshape(2, seq_len, -1, chunk).any(-1)).sum(1)  # [Hq, NC]
    blocks = (-(-queries // block)).sum() / 2 * chunk * block
    blocks += sum(b % (chunk // block) + 1 for b in range(seq_len // block)) * block**2
    assert abs(found[2] - blocks / total) < 1e-5
