"""Bit sets of block numbers: bit b % 32 of word b // 32 says whether b is in the set."""

import functools

import jax.numpy as jnp
from jax import Array, lax

WORD = 32
BYTES_AT_ONCE = 1 << 28  # of a temporary array with an entry for every number and set


def words_for(size: int) -> int:
    """Returns the number of words that hold `size` bits."""
    return -(-size // WORD)


def pack(marked: Array) -> Array:
    """Packs bool [..., n] into words uint32 [..., ceil(n/32)]; bits past n are 0."""
    size = marked.shape[-1]
    words = words_for(size)
    marked = jnp.pad(marked, [(0, 0)] * (marked.ndim - 1) + [(0, words * WORD - size)])
    bits = marked.reshape(*marked.shape[:-1], words, WORD).astype(jnp.uint32)
    return (bits << _places()).sum(-1, dtype=jnp.uint32)


def unpack(words: Array, size: int) -> Array:
    """Unpacks the first `size` bits of words uint32 [..., w] to bool [..., size]."""
    bits = (words[..., None] >> _places()) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :size].astype(bool)


def contains(words: Array, numbers: Array) -> Array:
    """Whether each number int32 [n] is in the sets uint32 [..., w]; False from 32 w on."""
    word = jnp.take(words, numbers // WORD, axis=-1, mode="fill", fill_value=0)
    return ((word >> (numbers % WORD).astype(jnp.uint32)) & 1).astype(bool)


def single(numbers: Array, words: int) -> Array:
    """Builds sets of one number (none if negative): int32 [..., n] to uint32 [..., n, words]."""
    bit = jnp.uint32(1) << (numbers % WORD).astype(jnp.uint32)
    here = jnp.arange(words, dtype=jnp.int32) == (numbers // WORD)[..., None]
    return jnp.where(here, bit[..., None], jnp.uint32(0))


def ranges(first: Array, last: Array, size: int) -> Array:
    """Builds sets of first .. last (inclusive), int32 [...]: uint32 [..., ceil(size/32)]."""
    numbers = jnp.arange(size, dtype=jnp.int32)
    return pack((numbers >= first[..., None]) & (numbers <= last[..., None]))


def count(words: Array) -> Array:
    """Counts the numbers in each set: uint32 [..., w] to int32 [...]."""
    return lax.population_count(words).astype(jnp.int32).sum(-1, dtype=jnp.int32)


def count_before(words: Array) -> Array:
    """Counts the numbers in the words before each word: int32 [..., w]."""
    each = lax.population_count(words).astype(jnp.int32)
    return jnp.cumsum(each, axis=-1, dtype=jnp.int32) - each


def transpose(words: Array, size: int) -> Array:
    """Returns the rows that contain each number: [..., rows, w] to [..., size, ceil(rows/32)]."""
    rows = words.shape[-2]
    parts = words.reshape(-1, *words.shape[-2:])
    if len(parts) * rows * size <= BYTES_AT_ONCE:
        columns = _transpose(parts, size)
    else:
        columns = lax.map(functools.partial(_transpose, size=size), parts)
    return columns.reshape(*words.shape[:-2], size, -1)


def _transpose(words: Array, size: int) -> Array:
    rows = words.shape[-2]
    padded = words_for(rows) * WORD
    marked = unpack(words, size)
    marked = jnp.pad(marked, [(0, 0)] * (marked.ndim - 2) + [(0, padded - rows), (0, 0)])
    bits = marked.reshape(*marked.shape[:-2], -1, WORD, size).astype(jnp.uint32)
    return (bits << _places()[:, None]).sum(-2, dtype=jnp.uint32).swapaxes(-1, -2)


def listed(words: Array, size: int) -> tuple[Array, Array]:
    """Lists each set in ascending order: int32 [..., size], padded, and counts int32 [...]."""
    rows = words.reshape(-1, words.shape[-1])
    steps = max(-(-4 * len(rows) * size // BYTES_AT_ONCE), 1)
    if steps == 1:
        lists = _listed(rows, size)
    else:
        chunk = -(-len(rows) // steps)
        parts = jnp.pad(rows, ((0, steps * chunk - len(rows)), (0, 0)))
        parts = parts.reshape(steps, chunk, -1)
        lists = lax.map(functools.partial(_listed, size=size), parts)
        lists = lists.reshape(-1, size)[: len(rows)]
    return lists.reshape(*words.shape[:-1], size), count(words)


def _listed(words: Array, size: int) -> Array:
    rows, width = words.shape
    # Flat arrays: a gather with a single index is fused with its consumers.
    before, flat = count_before(words).reshape(-1), words.reshape(-1)
    start = width * jnp.arange(rows, dtype=jnp.int32)[:, None]
    slots = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (rows, size))
    word = jnp.zeros_like(slots)
    for step in _halves(width):
        later = jnp.minimum(word + step, width - 1)
        word = jnp.where(_at(before, start + later) <= slots, later, word)
    bits, rest = _at(flat, start + word), slots - _at(before, start + word)
    place = jnp.zeros_like(slots)
    for step in _halves(WORD):
        later = place + step
        below = bits & ((jnp.uint32(1) << later.astype(jnp.uint32)) - 1)
        held = lax.population_count(below).astype(jnp.int32)
        place = jnp.where(held <= rest, later, place)
    return word * WORD + place


def _halves(size: int) -> list[int]:
    return [1 << i for i in reversed(range((size - 1).bit_length()))]


def _at(x: Array, numbers: Array) -> Array:
    return x.at[numbers].get(mode="promise_in_bounds")


def _places() -> Array:
    return jnp.arange(WORD, dtype=jnp.uint32)
