"""Queries and keys that attend in the ways real heads do."""

import jax.numpy as jnp
import numpy as np


def random(seed, batch, seq_len, num_heads, kv_heads, head_dim, dtype=jnp.float32):
    """Noise, with some columns and distances that stand out, differently for every head."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(batch, seq_len, num_heads, head_dim))
    k = rng.normal(size=(batch, seq_len, kv_heads, head_dim))
    # Columns: keys along a direction that all queries share.
    q[..., 0] += 1.5
    k[:, rng.choice(seq_len, seq_len // 40, replace=False), :, 0] += 5.0
    # Distances: a rotation of q and k together, as rotary embeddings make.
    angle = np.arange(seq_len)[None, :, None] * 0.4
    for x in (q, k):
        x[..., 1] += 2.5 * np.cos(angle)
        x[..., 2] += 2.5 * np.sin(angle)
    # Converted in NumPy, as JAX would compile it for each shape.
    q, k = (x.astype(jnp.dtype(dtype)) for x in (q, k))
    return jnp.asarray(q), jnp.asarray(k)


def one_sink(seq_len, head_dim=16, token=0, mass=0.9975):
    """One head whose queries all put a share `mass` on one token, the rest evenly elsewhere."""
    q = np.zeros((1, seq_len, 1, head_dim), np.float32)
    k = np.zeros((1, seq_len, 1, head_dim), np.float32)
    q[..., 0] = 1.0
    k[:, token, :, 0] = np.sqrt(head_dim) * np.log(mass / (1 - mass) * (seq_len - 1))
    return jnp.asarray(q), jnp.asarray(k)
