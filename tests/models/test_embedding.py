"""Embedding lookup, and the sums of its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.models.embedding import BLOCK, embed, sum_rows

SIZE, WIDTH = 40, 8


def drawn(count: int, numbers: str) -> np.ndarray:
    rng = np.random.default_rng(count)
    anything = rng.integers(0, SIZE + 9 * (numbers == "some beyond"), count)
    if numbers == "one":
        anything[:] = SIZE - 1
    if numbers == "one in most places":
        anything[rng.random(count) < 0.9] = 7
    return anything.astype(np.int32)


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize("numbers", ["any", "one in most places", "one", "some beyond"])
def test_rows_with_the_same_id_are_added(count, numbers):
    numbers = drawn(count, numbers)
    rows = np.random.default_rng(0).normal(size=(count, WIDTH)).astype(np.float32)
    expected = np.zeros((SIZE, WIDTH))
    inside = numbers < SIZE
    np.add.at(expected, numbers[inside], rows[inside].astype(np.float64))
    found = jax.jit(sum_rows, static_argnums=2)(rows, numbers, SIZE)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_accumulates_in_fp32(dtype):
    numbers = drawn(5 * BLOCK, "one in most places")
    rows = jnp.asarray(np.random.default_rng(1).normal(size=(len(numbers), WIDTH)), dtype)
    expected = np.zeros((SIZE, WIDTH))
    np.add.at(expected, numbers, np.asarray(rows, np.float64))
    found = jax.jit(sum_rows, static_argnums=2)(rows, jnp.asarray(numbers), SIZE)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_the_gradient_of_a_lookup_is_that_of_plain_indexing():
    table = jax.random.normal(jax.random.key(0), (SIZE, WIDTH))
    tokens = jnp.asarray(drawn(60, "any").reshape(3, 20))
    weights = jax.random.normal(jax.random.key(1), (3, 20, WIDTH))

    def loss(look, table):
        return jnp.sum(jnp.sin(look(table)) * weights)

    ours, plain = (
        jax.value_and_grad(lambda table, look=look: loss(look, table))(table)
        for look in (lambda table: embed(table, tokens, jnp.float32), lambda table: table[tokens])
    )
    assert ours[0] == plain[0]
    np.testing.assert_array_equal(ours[1], plain[1])  # the same additions on a CPU


def test_on_gpus_no_sum_depends_on_the_order_of_atomic_additions():
    """A scatter-add that may meet an index twice is atomic on GPUs, in any order."""

    def gradient(table, tokens):
        return jax.grad(lambda table: embed(table, tokens, jnp.bfloat16).sum())(table)

    traced = jax.jit(gradient).trace(jnp.zeros((SIZE, WIDTH)), jnp.zeros((4, 70), jnp.int32))
    cpu, gpu = (
        traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "cuda")
    )
    assert "unique_indices = false" in cpu
    assert "unique_indices = true" in gpu and "unique_indices = false" not in gpu
