"""Splits the tokens of a device into equal chunks. Does not import JAX."""


def num_chunks(tokens: int, chunk_size: int) -> int:
    """The smallest number of equal chunks of at most `chunk_size` tokens."""
    count = -(-tokens // chunk_size)
    while tokens % count:
        count += 1
    return count


def first_chunks(tokens: int, chunk_size: int, chunks: int) -> int:
    """How many tokens the first `chunks` of `num_chunks` have; at most all."""
    count = num_chunks(tokens, chunk_size)
    return min(chunks, count) * (tokens // count)
