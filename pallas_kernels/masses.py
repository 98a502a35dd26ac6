"""Softmax masses of key blocks from scores of key blocks, which a kernel gives.

Everything here is XLA, the same for all kernels. A row's results come from integers and elementwise
steps alone, so their bits depend on nothing but the row, its place and the keys that it sees.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

_MOST_BLOCKS = 1 << 13  # more would overflow the sums of `_HIGH_BITS`
LOG2E = math.log2(math.e)
_HIGH_BITS = 17
_LOW_BITS = 13
_MASS_BITS = 30
_SCORE_BYTES = 1 << 29  # of scores in memory at a time; twice that where it saves time
_CLEARLY = 1.02  # how many times less time is worth the memory
_DTYPES = (jnp.bfloat16, jnp.float16)

# A kernel: rows [B, Hq, R, E], keys [B, Hk, C, E], places int32 [B or 1, R] and starts int32 [B, R]
# or None (in which case places may be [1, R]) in; scores fp32 [B, Hq, NB or more, R] and peak fp32
# [B, Hq, R] out. A score is the base-2 logarithm of the sum of exp(scale q k) over a block's keys
# that a row sees: -inf where it sees none of them, or anything if no row of its tile does. The peak
# is the largest product of scale, q, k and log2(e) that a row sees, -inf if it sees none.
Score = Callable[[Array, Array, Array, Array | None], tuple[Array, Array]]


def unsupported_by_kernel(q: Array, k: Array, *, depth: int, width: int) -> str | None:
    """`BlockScores.unsupported` of a kernel.

    Args:
        q, k: as in `BlockScores.unsupported`.
        depth: numbers of a row that the kernel multiplies at a time.
        width: keys that it takes at a time.
    """
    columns, length = k.shape[3:]
    if q.dtype not in _DTYPES or k.dtype != q.dtype:
        return f"dtypes {q.dtype} and {k.dtype} (bfloat16 or float16 is needed)"
    if length % depth:
        return f"rows of {length} numbers (multiples of {depth} are needed)"
    if columns % 8 or width % columns:
        return f"{columns} rows of keys in a block (8, 16, 32, 64 or 128 are needed)"
    if k.shape[2] > _MOST_BLOCKS:
        return f"{k.shape[2]} blocks of keys (at most {_MOST_BLOCKS} are possible)"
    return None


def masses_from_scores(
    score: Score, q: Array, k: Array, places: Array, first_blocks: Array | None, *,
    scale: float, levels: bool, tile_rows: int, width: int, programs: int,
) -> Array | tuple[Array, Array]:
    """`BlockScores.block_masses` by a kernel; masses are multiples of 2^-30.

    Args:
        score: the kernel.
        q, k, places, first_blocks, scale, levels: as in `BlockScores.block_masses`.
        tile_rows: rows that the kernel takes at a time; it gets a multiple of them.
        width: keys that it takes at a time; likewise.
        programs: how many tiles of rows, of one head each, it works on at the same time.
    """
    batch, heads, num_local, num_rows, length = q.shape
    num_blocks, columns = k.shape[2:4]
    # As many rows of blocks at a time as make whole tiles of rows.
    whole = tile_rows // math.gcd(tile_rows, num_rows)
    of_one = 4 * batch * heads * num_rows * num_blocks
    items = batch * heads * (whole * num_rows // tile_rows)
    chunk = whole * parts_at_once(
        -(-num_local // whole), items, programs, _SCORE_BYTES / (of_one * whole)
    )
    steps = -(-num_local // chunk)
    padding = steps * chunk - num_local
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0), (0, 0)))
    places = jnp.pad(places, ((0, 0), (0, padding), (0, 0)), constant_values=-1)
    starts = None
    if first_blocks is not None:
        starts = jnp.pad(first_blocks * columns, ((0, 0), (0, padding)))
        starts = jnp.repeat(starts, num_rows, axis=1)
        places = jnp.broadcast_to(places, (batch, *places.shape[1:]))
    k = k.reshape(*k.shape[:2], -1, length)
    k = jnp.pad(k, ((0, 0), (0, 0), (0, -k.shape[2] % width), (0, 0)))

    def step(i: Array) -> tuple[Array, Array]:
        own = lax.dynamic_slice_in_dim(q, i * chunk, chunk, axis=2)
        seen = lax.dynamic_slice_in_dim(places, i * chunk, chunk, axis=1)
        seen = seen.reshape(places.shape[0], -1)
        begin = starts
        if begin is not None:
            size = chunk * num_rows
            begin = lax.dynamic_slice_in_dim(starts, i * size, size, axis=1)
        scores, peak = score(own.reshape(batch, heads, -1, length), k, seen, begin)
        masses, of_rows = _masses(
            scores[:, :, :num_blocks], peak, seen, begin, columns, num_rows
        )
        return masses, of_rows.reshape(batch, heads, chunk, num_rows)

    if steps == 1:
        found = [x[None] for x in step(jnp.int32(0))]
    else:
        found = lax.map(step, jnp.arange(steps))
    masses, of_rows = (
        jnp.moveaxis(x, 0, 2).reshape(batch, heads, steps * chunk, -1)[:, :, :num_local]
        for x in found
    )
    if not levels:
        return masses
    # The minimum keeps the product from being contracted with a sum that it goes into.
    largest = float(jnp.finfo(jnp.float32).max)
    return masses, jnp.minimum(of_rows * (1 / (scale * LOG2E)), largest)


def parts_at_once(count: int, items: int, programs: int, room: float) -> int:
    """How many parts of a causal sequence are best scored in one step.

    A step's items are dealt in turns, those that see most first, so its time is that of the program
    that has the first item of each turn. A step with a few items more than there are programs takes
    nearly twice as long as one with a few less.

    Args:
        count: parts that the sequence is cut into; part i sees i + 1 parts.
        items: of each part.
        programs: that work at the same time.
        room: parts that memory is meant for; at least 1 is taken, and up to twice as many where
            they take clearly less time.

    Returns:
        The number that takes the least time in all, and of equal ones the largest.
    """

    def seconds(size: int) -> int:
        found = 0
        for begin in range(0, count, size):
            end = min(begin + size, count)
            turns = range(0, (end - begin) * items, programs)
            found += sum(end - first // items for first in turns)
        return found

    few, many = (
        min(range(max(1, min(int(most), count)), 0, -1), key=seconds) for most in (room, 2 * room)
    )
    return many if _CLEARLY * seconds(many) < seconds(few) else few


def _masses(
    scores: Array, peak: Array, places: Array, starts: Array | None, columns: int, num_rows: int
) -> tuple[Array, Array]:
    """Mean over the rows of a block of their softmax over key blocks.

    Sums are sums of integers, whose order means nothing.

    Args:
        scores: fp32 [B, H, NB, R], as the kernel gives them.
        peak: fp32 [B, H, R].
        places: int32 [B or 1, R].
        starts: int32 [B, R], or None, as the kernel takes them.
        columns: c, of one key block.
        num_rows: r, rows of one block of queries.

    Returns:
        fp32 [B, H, R / r, NB]; and fp32 [B, H, R], base-2 logarithms of the rows' whole sums.
    """
    num_blocks = scores.shape[2]
    block_starts = jnp.arange(num_blocks, dtype=jnp.int32)[:, None] * columns
    seen = block_starts <= places[:, None, None]
    if starts is not None:
        seen &= block_starts >= starts[:, None, None]
    # A block is at most `columns` times as heavy as its heaviest column.
    base = jnp.where(peak > -jnp.inf, peak, 0.0)[:, :, None] + (columns - 1).bit_length()
    weights = jnp.where(seen, jnp.exp2(jnp.minimum(scores - base, 0.0)), 0.0)
    in_high_units = weights * 2.0**_HIGH_BITS
    high = in_high_units.astype(jnp.int32)
    low = jnp.round((in_high_units - high.astype(jnp.float32)) * 2.0**_LOW_BITS).astype(jnp.int32)
    high, low = (x.sum(2, dtype=jnp.int32).astype(jnp.float32) for x in (high, low))
    # The product is exact (a power of two), so contraction cannot change this sum.
    total = (high + low * 2.0**-_LOW_BITS) * 2.0**-_HIGH_BITS
    total = jnp.where(total > 0, total, 1.0)[:, :, None]  # of a row that sees nothing
    shares = jnp.round(weights / total * float((1 << _MASS_BITS) // num_rows)).astype(jnp.int32)
    of_blocks = shares.reshape(*shares.shape[:3], -1, num_rows).sum(-1, dtype=jnp.int32)
    masses = jnp.swapaxes(of_blocks.astype(jnp.float32) * 2.0**-_MASS_BITS, 2, 3)
    return masses, (base + jnp.log2(total))[:, :, 0]
