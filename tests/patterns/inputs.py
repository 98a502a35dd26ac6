"""Queries and keys with attention like that of real heads."""

import jax.numpy as jnp
import numpy as np


def random(seed, batch, seq_len, num_heads, kv_heads, head_dim, dtype=jnp.float32):
    """Noise with a few prominent columns and distances, different for every head."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(batch, seq_len, num_heads, head_dim))
    k = rng.normal(size=(batch, seq_len, kv_heads, head_dim))
    # Columns: keys along a direction shared by all queries.
    q[..., 0] += 1.5
    k[:, rng.choice(seq_len, seq_len // 40, replace=False), :, 0] += 5.0
    # Distances: a joint rotation of q and k, as in rotary embeddings.
    angle = np.arange(seq_len)[None, :, None] * 0.4
    for x in (q, k):
        x[..., 1] += 2.5 * np.cos(angle)
        x[..., 2] += 2.5 * np.sin(angle)
    # Converted with NumPy; JAX would compile it for each shape.
    q, k = (x.astype(jnp.dtype(dtype)) for x in (q, k))
    return jnp.asarray(q), jnp.asarray(k)


def one_sink(seq_len, head_dim=16, token=0, mass=0.9975):
    """One head with a fraction `mass` of each query on one token, the rest spread evenly."""
    q = np.zeros((1, seq_len, 1, head_dim), np.float32)
    k = np.zeros((1, seq_len, 1, head_dim), np.float32)
    q[..., 0] = 1.0
    k[:, token, :, 0] = np.sqrt(head_dim) * np.log(mass / (1 - mass) * (seq_len - 1))
    return jnp.asarray(q), jnp.asarray(k)
