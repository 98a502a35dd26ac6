"""Seeded inputs for kernel tests: sparse indices with every difficult shape of row.

Each (batch entry, query head) uses the next of `KINDS`, so one array and one compilation cover many
cases.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    BlockMaskIndex,
    BlockSparseIndex,
    Columns,
    DenseIndex,
    DiagonalTiles,
    VerticalSlashIndex,
)
from pallas_kernels.index import Index
from pallas_kernels.tiles import Tiles

_INT32 = np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True)
class Size:
    """The shape of an attention problem; lengths in blocks of `block_size` tokens."""

    batch: int
    heads: int
    kv_heads: int
    query_blocks: int
    key_blocks: int
    block_size: int
    dim: int

    @property
    def seq_len(self) -> int:
        return self.key_blocks * self.block_size


# Generates one head: (rng, number of blocks, block size, capacities) -> diagonals, verticals.
Kind = Callable[[np.random.Generator, int, int, int, int], tuple[list[int], list[int]]]


def _near_and_far(rng, blocks, g, max_slashes, max_verticals):
    """The main diagonal, distant ones, and verticals inside and outside their blocks."""
    far = _some(rng, range(1, blocks), max(max_slashes - 2, 0))
    return [0, *far], _some(rng, range(blocks * g), max_verticals - 3)


def _far_only(rng, blocks, g, max_slashes, max_verticals):
    """Diagonals and verticals that leave the first half of the rows empty."""
    slashes = _some(rng, range(blocks // 2, blocks), max_slashes - 1)
    return slashes, _some(rng, range(blocks * g // 2, blocks * g), max_verticals // 2)


def _verticals_only(rng, blocks, g, max_slashes, max_verticals):
    """No diagonals: every causal mask comes from positions. Row 0 is empty."""
    return [], _some(rng, range(1, blocks * g), max_verticals - 1)


def _diagonals_only(rng, blocks, g, max_slashes, max_verticals):
    return _some(rng, range(blocks), max_slashes - 1), []


def _full_capacity(rng, blocks, g, max_slashes, max_verticals):
    return (_some(rng, range(blocks), max_slashes), _some(rng, range(blocks * g), max_verticals))


def _crowded_block(rng, blocks, g, max_slashes, max_verticals):
    """Adjacent verticals in one block and across its edge, half of them in active blocks."""
    start = int(rng.integers(blocks // 2)) * g + g // 2
    return [0, 1], list(range(start, start + min(g, max_verticals - 1)))


def _nothing(rng, blocks, g, max_slashes, max_verticals):
    return [], []


def _corners(rng, blocks, g, max_slashes, max_verticals):
    """One tile in the far corner, the first and the last token."""
    return [blocks - 1], [0, blocks * g - 1]


KINDS: tuple[Kind, ...] = (
    _near_and_far,
    _far_only,
    _verticals_only,
    _full_capacity,
    _crowded_block,
    _nothing,
    _corners,
    _diagonals_only,
)


def every_diagonal(batch: int, heads: int, seq_len: int, block_size: int) -> VerticalSlashIndex:
    """All block diagonals listed: the same pairs as a causal `DenseIndex`."""
    blocks = seq_len // block_size
    return VerticalSlashIndex(
        slash_blocks=jnp.broadcast_to(jnp.arange(blocks, dtype=jnp.int32), (batch, heads, blocks)),
        slash_count=jnp.full((batch, heads), blocks, jnp.int32),
        vertical_tokens=jnp.zeros((batch, heads, 0), jnp.int32),
        vertical_count=jnp.zeros((batch, heads), jnp.int32),
        block_size=block_size,
    )


def vertical_slash(
    rng: np.random.Generator,
    size: Size,
    *,
    max_slashes: int,
    max_verticals: int,
    garbage: np.random.Generator | None = None,
) -> VerticalSlashIndex:
    """A random index with heads that cycle through `KINDS`, from a random one on.

    Args:
        rng: generator of the index.
        size: size of the problem; query and key lengths are equal.
        max_slashes: capacity, at least 3.
        max_verticals: capacity, at least 4.
        garbage: fills the padding with arbitrary values; None fills it as documented.
    """
    blocks, g = size.key_blocks, size.block_size
    slashes = _padding(garbage, (size.batch, size.heads, max_slashes), blocks)
    verticals = _padding(garbage, (size.batch, size.heads, max_verticals), size.seq_len)
    slash_count = np.zeros((size.batch, size.heads), np.int32)
    vertical_count = np.zeros_like(slash_count)
    first = int(rng.integers(len(KINDS)))
    for n, at in enumerate(np.ndindex(*slash_count.shape), first):
        diagonals, tokens = KINDS[n % len(KINDS)](rng, blocks, g, max_slashes, max_verticals)
        slash_count[at], vertical_count[at] = len(diagonals), len(tokens)
        slashes[at][: len(diagonals)] = sorted(diagonals)
        verticals[at][: len(tokens)] = sorted(tokens)
    return VerticalSlashIndex(
        jnp.asarray(slashes),
        jnp.asarray(slash_count),
        jnp.asarray(verticals),
        jnp.asarray(vertical_count),
        g,
    )


@functools.partial(jax.jit, static_argnames="size")
def tiles_and_columns(index: Index, size: Size) -> tuple[Tiles, Columns | None]:
    """Converts an index to tiles and columns, the input of work lists, in one program."""
    return index.on_one_device(size.batch, size.seq_len, size.heads, size.seq_len)


def block_sparse(
    rng: np.random.Generator,
    size: Size,
    *,
    causal: bool,
    garbage: np.random.Generator | None = None,
) -> BlockSparseIndex:
    """Random block lists: ragged rows, empty rows and columns, one full row, one empty head."""
    shape = (size.batch, size.heads, size.query_blocks, size.key_blocks)
    mask = rng.random(shape) < rng.uniform(0.05, 0.3, (size.batch, size.heads, 1, 1))
    mask[:, :, rng.integers(size.query_blocks)] = False
    mask[:, :, :, rng.integers(size.key_blocks)] = False
    mask[:, size.heads // 2, -1] = True
    mask[:, 0, -1] = np.arange(size.key_blocks) < size.key_blocks - 1
    mask[-1, -1] = False
    index = lists_of_mask(mask, size.block_size, causal)
    if garbage is None:
        return index
    return dataclasses.replace(
        index,
        key_blocks=_spoil(garbage, index.key_blocks, index.key_count),
        query_blocks=_spoil(garbage, index.query_blocks, index.query_count),
    )


def block_mask_with_columns(
    rng: np.random.Generator, size: Size, *, max_columns: int
) -> BlockMaskIndex:
    """Random blocks as bits, as in `block_sparse`, with columns; the last head has none.

    In every other head, starting with the first, the second half of the rows sees only its own
    columns. In the first head all tokens are columns if there is room, and the last row lists all
    blocks but its own.
    """
    shape = (size.batch, size.heads, size.key_blocks, size.key_blocks)
    mask = rng.random(shape) < rng.uniform(0.05, 0.3, (size.batch, size.heads, 1, 1))
    mask[:, :, rng.integers(size.key_blocks)] = False
    mask[:, size.heads // 2, -1] = True
    mask[:, 0, -1] = np.arange(size.key_blocks) < size.key_blocks - 1
    mask[0, -1] = False
    tokens = rng.integers(0, size.seq_len, (size.batch, size.heads, max_columns))
    tokens[:, :, 0], tokens[:, :, 1] = 0, size.seq_len - 1
    tokens[:, :, 2:4] = size.seq_len  # padding
    if max_columns >= size.seq_len:
        tokens[:, 0, : size.seq_len] = np.arange(size.seq_len)
    tokens[-1, -1] = size.seq_len
    half = size.key_blocks // 2
    rows, heads = np.arange(size.key_blocks), np.arange(size.heads)
    start = np.where(rows < half, 0, half) * (heads % 2 == 0)[:, None]
    return _bits_and_columns(mask, tokens.astype(np.int32), start, size.block_size)


def documents_of_columns(size: Size, *, documents: int) -> BlockMaskIndex:
    """Documents of equal length; the first row of blocks lists its own block.

    All tokens are columns; in the last head every third one.
    """
    blocks = size.key_blocks
    first = np.arange(blocks) // -(-blocks // documents) * -(-blocks // documents)
    mask = np.zeros((size.batch, size.heads, blocks, blocks), bool)
    mask[:, :, 0, 0] = True
    tokens = np.tile(np.arange(size.seq_len, dtype=np.int32), (size.batch, size.heads, 1))
    tokens[:, -1, np.arange(size.seq_len) % 3 > 0] = size.seq_len
    return _bits_and_columns(mask, tokens, first, size.block_size)


# Programs of many small operations, compiled as a whole.
lists_of_mask = jax.jit(BlockSparseIndex.from_block_mask, static_argnums=(1, 2))
bits_of_mask = jax.jit(BlockMaskIndex.from_block_mask, static_argnums=1)


@functools.partial(jax.jit, static_argnums=3)
def _bits_and_columns(mask, tokens, start, block_size) -> BlockMaskIndex:
    """Blocks as bits, with columns that rows see from a block on."""
    index = BlockMaskIndex.from_block_mask(mask, block_size)
    return index.with_columns(tokens).columns_from(start)


def dense_documents(size: Size, lengths: list[list[int]]) -> DenseIndex:
    """Consecutive documents of the given lengths in blocks, for each batch entry, then padding.

    A negative length is padding.
    """
    first = np.full((size.batch, size.heads, size.key_blocks), size.key_blocks, np.int32)
    end = np.zeros_like(first)
    for b, own in enumerate(lengths):
        start = 0
        for length in own:
            at = slice(start, start := start + abs(length))
            if length > 0:
                first[b, :, at], end[b, :, at] = at.start, at.stop
    return DenseIndex(size.block_size, first=jnp.asarray(first), end=jnp.asarray(end))


def diagonal_tiles(
    rng: np.random.Generator,
    size: Size,
    *,
    capacity: int,
    diagonal: int,
    garbage: np.random.Generator | None = None,
) -> DiagonalTiles:
    """Random local offsets of either sign, in the middle of longer lists, as in a ring step.

    Offsets start at `diagonal`, which most heads have; some meet no block of the shard pair.
    """
    start = rng.integers(0, capacity // 2, (size.batch, size.heads)).astype(np.int32)
    stop = start.copy()
    everywhere = range(max(-size.key_blocks - 1, diagonal), size.query_blocks + 2)
    offsets = _padding(garbage, (size.batch, size.heads, capacity), 0)
    for at in np.ndindex(*start.shape):
        live = set(_some(rng, everywhere, int(rng.integers(capacity // 2))))
        if diagonal in everywhere and rng.random() < 0.7:
            live.add(diagonal)
        stop[at] += len(live)
        offsets[at][start[at] : stop[at]] = sorted(live)
    return DiagonalTiles(
        jnp.asarray(offsets),
        jnp.asarray(start),
        jnp.asarray(stop),
        jnp.int32(diagonal),
        size.block_size,
    )


def qkv_dout(rng: np.random.Generator, size: Size, dtype: str) -> list[jnp.ndarray]:
    """Normal q, k, v and output gradient; heads differ in the sharpness of their softmax."""
    queries = (size.batch, size.query_blocks * size.block_size, size.heads, size.dim)
    keys = (size.batch, size.key_blocks * size.block_size, size.kv_heads, size.dim)
    arrays = [rng.standard_normal(shape) for shape in (queries, keys, keys, queries)]
    arrays[0] *= rng.uniform(0.5, 2.5, (size.batch, 1, size.heads, 1))
    return [_of_dtype(x, dtype) for x in arrays]


def counting(rng: np.random.Generator, size: Size, dtype: str) -> list[jnp.ndarray]:
    """Integer q, k, v, dout with all logits exactly 0, so that sums count pairs exactly.

    q uses the first half of the head dimensions and k the second. Values are small enough to be
    exact in bf16 and fp16, and their sums in fp32.
    """
    queries = (size.batch, size.query_blocks * size.block_size, size.heads, size.dim)
    keys = (size.batch, size.key_blocks * size.block_size, size.kv_heads, size.dim)
    q, k, v, dout = (rng.integers(-1, 2, shape) for shape in (queries, keys, keys, queries))
    q[..., size.dim // 2 :] = 0
    k[..., : size.dim // 2] = 0
    return [_of_dtype(x, dtype) for x in (q, k, v, dout)]


def _of_dtype(x: np.ndarray, dtype: str) -> jnp.ndarray:
    """Converts with NumPy; JAX would compile it for each shape."""
    return jnp.asarray(x.astype(jnp.dtype(dtype)))


def _some(rng: np.random.Generator, values: range, count: int) -> list[int]:
    """Up to `count` different values."""
    count = max(0, min(count, len(values)))
    return [int(x) for x in rng.choice(np.asarray(values), count, replace=False)]


def _padding(garbage: np.random.Generator | None, shape: tuple[int, ...], past: int) -> np.ndarray:
    if garbage is None:
        return np.full(shape, past, np.int32)
    awkward = np.asarray([_INT32.min, -1, 0, 1, past - 1, past, past + 1, _INT32.max], np.int32)
    return garbage.choice(awkward, shape)


def _spoil(garbage: np.random.Generator, lists: jnp.ndarray, count: jnp.ndarray) -> jnp.ndarray:
    values, count = np.array(lists), np.asarray(count)
    padding = np.arange(values.shape[-1]) >= count[..., None]
    values[padding] = _padding(garbage, values.shape, values.shape[-1])[padding]
    return jnp.asarray(values)
