"""Determinism of the gradient of an embedding lookup on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np

from mtraining_jax.models.embedding import embed

TOKENS, SIZE, WIDTH = 65536, 512, 256


def test_a_gradient_is_bit_identical_a_hundred_times():
    # Numbers of very different magnitude: their sum depends on the order, even in half precision.
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(np.minimum(rng.geometric(0.01, TOKENS), SIZE) - 1, jnp.int32)
    weights = jnp.asarray(
        rng.normal(size=(TOKENS, WIDTH)) * np.exp(4 * rng.normal(size=(TOKENS, WIDTH))),
        jnp.bfloat16,
    )

    @jax.jit
    def gradient(table, weights):
        def loss(table):
            return jnp.vdot(embed(table, tokens, jnp.bfloat16).astype(jnp.float32), weights)

        return jax.grad(loss)(table)

    table = jnp.zeros((SIZE, WIDTH))
    first = gradient(table, weights)
    expected = np.zeros((SIZE, WIDTH))
    np.add.at(expected, np.asarray(tokens), np.asarray(weights, np.float64))
    scale = np.zeros((SIZE, WIDTH))
    np.add.at(scale, np.asarray(tokens), np.abs(np.asarray(weights, np.float64)))
    assert np.max(np.abs(first - expected) / np.maximum(scale, 1)) < 1e-5
    assert all(np.array_equal(first, gradient(table, weights)) for _ in range(100))
