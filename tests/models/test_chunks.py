"""Numbers of equal chunks of tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.models.products import chunked, first_chunks, num_chunks


@pytest.mark.parametrize(
    ("tokens", "chunk_size", "count", "size"),
    [
        (1 << 20, 1024, 1024, 1024),
        (1000, 1024, 1, 1000),
        (24, 5, 6, 4),  # one more chunk, and no padding
        (128 * 8191, 1024, 1024, 1024),  # the next divisor is 8191
        (23, 5, 5, 5),
        (62, 16, 4, 16),
        (37, 36, 2, 19),
    ],
)
def test_there_are_few_chunks_of_any_number_of_tokens(tokens, chunk_size, count, size):
    assert num_chunks(tokens, chunk_size) == count
    assert first_chunks(tokens, chunk_size, 1) == size <= chunk_size
    assert (
        first_chunks(tokens, chunk_size, count) == tokens == first_chunks(tokens, chunk_size, 9999)
    )


def test_the_last_chunk_is_padded():
    x = jnp.arange(1, 11).reshape(5, 2)
    np.testing.assert_array_equal(chunked(x[:4], 2), x[:4].reshape(2, 2, 2))
    expected = [[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [-1, -1]]]
    np.testing.assert_array_equal(chunked(x, 3, -1), expected)
    np.testing.assert_array_equal(chunked(x, 3)[1, 2], [0, 0])
