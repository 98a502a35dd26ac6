"""Softmax masses of key blocks, from a kernel's scores; integer sums, computed by XLA."""

import abc
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.checks import BLOCK_SIZE, Shaped

LOG2E = math.log2(math.e)
DEPTH = 64  # rows of a kernel have a multiple of this many components
WIDTH = 128  # a multiple of the columns per block, and a divisor of the columns per tile
_MOST_BLOCKS = 1 << 16  # more would overflow the sums of `_HIGH_BITS`
_HIGH_BITS = _LOW_BITS = 14
MASS_BITS = 30
_SCORE_BYTES = 1 << 29  # of scores in memory at a time; up to twice that if clearly faster
_CLEARLY = 1.02  # speedup that justifies the additional memory
_DTYPES = (jnp.bfloat16, jnp.float16)


class ScoreTiles(NamedTuple):
    """Sizes of a kernel's tiles."""

    rows: int  # the kernel gets a multiple of this many rows
    columns: int  # and of this many key rows
    programs: int  # row tiles of one head each that run concurrently


class ScoreCall(NamedTuple):
    """Rows and columns to score, in whole tiles of a kernel."""

    q: Array  # [B, Hq, R, E], rows, bf16 or fp16
    k: Array  # [B, Hk, C, E], columns
    places: Array  # int32 [B, R] or (without starts) [1, R], the last column seen, or -1
    starts: Array | None  # int32 [B, R], the first one, at the start of a block; None for 0
    scale: float  # of the products, positive
    block_columns: int  # c, columns per key block


class BlockScores(abc.ABC):
    """Scores key blocks by the softmax mass of rows of queries; subclasses provide the kernel."""

    @abc.abstractmethod
    def tiles(self, length: int) -> ScoreTiles:
        """Returns the sizes of tiles for rows of `length` components."""

    @abc.abstractmethod
    def scores(self, call: ScoreCall) -> tuple[Array, Array]:
        """Returns scores fp32 [B, Hq, C / c or more, R] and peaks fp32 [B, Hq, R].

        A score is the base-2 logarithm of the sum of exp(scale q k) over the columns of a block
        that a row sees: -inf for none, arbitrary if no row of its tile sees any. A peak is the
        largest product of scale, q, k and log2(e) that a row sees, else -inf.
        """

    def unsupported(self, q: Shaped, k: Shaped) -> str | None:
        """Why the kernel does not support these shapes and dtypes, or None."""
        columns, length = k.shape[3:]
        if q.dtype not in _DTYPES or k.dtype != q.dtype:
            return f"dtypes {q.dtype} and {k.dtype} (must both be bfloat16 or float16)"
        if length % DEPTH:
            return f"rows of {length} components (must be a multiple of {DEPTH})"
        if columns % 8 or WIDTH % columns:
            return f"{columns} rows of keys per block (must be 8, 16, 32, 64 or 128)"
        if k.shape[2] > _MOST_BLOCKS:
            most = f"{_MOST_BLOCKS}, which is {_MOST_BLOCKS * BLOCK_SIZE} tokens"
            return f"{k.shape[2]} blocks of keys (must be at most {most})"
        return None

    def block_masses(
        self,
        q: Array,
        k: Array,
        places: Array,
        first_blocks: Array | None = None,
        *,
        scale: float,
        levels: bool = False,
    ) -> Array | tuple[Array, Array]:
        """Computes the softmax mass of each key block, mean over the rows of a query block.

        A row's result depends on no other row and not on the number of its first block.

        Args:
            q: [B, Hq, n, r, E], r rows of each of n query blocks.
            k: [B, Hk, NB, c, E], c rows of each key block, in sequence order.
            places: int32 [B or 1, n, r], the last key row (b * c + j) that each row sees, or -1.
            first_blocks: int32 [B, n], first key block that the rows of a block see, or None.
            scale: scale of the logits.
            levels: whether to also return the product q k with weight 1 of each row that sees any.

        Returns fp32 [B, Hq, n, NB], multiples of 2^-30, summing to the fraction of the r rows that
        see any key. With `levels`, a pair of it and fp32 [B, Hq, n, r].
        """
        batch, heads, num_local, num_rows, length = q.shape
        num_blocks, columns = k.shape[2:4]
        tiles = self.tiles(length)
        # The number of rows of blocks that make up whole row tiles.
        aligned_blocks = tiles.rows // math.gcd(tiles.rows, num_rows)
        bytes_per_block = 4 * batch * heads * num_rows * num_blocks
        items = batch * heads * (aligned_blocks * num_rows // tiles.rows)
        parts = -(-num_local // aligned_blocks)
        room = _SCORE_BYTES / (bytes_per_block * aligned_blocks)
        chunk = aligned_blocks * parts_at_once(parts, items, tiles.programs, room)
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
        k = jnp.pad(k, ((0, 0), (0, 0), (0, -k.shape[2] % tiles.columns), (0, 0)))

        def step(i: Array) -> tuple[Array, Array]:
            chunk_rows = lax.dynamic_slice_in_dim(q, i * chunk, chunk, axis=2)
            chunk_rows = chunk_rows.reshape(batch, heads, -1, length)
            seen = lax.dynamic_slice_in_dim(places, i * chunk, chunk, axis=1)
            seen = seen.reshape(places.shape[0], -1)
            begin, size = None, chunk * num_rows
            if starts is not None:
                begin = lax.dynamic_slice_in_dim(starts, i * size, size, axis=1)
            scores, peak = self.scores(ScoreCall(chunk_rows, k, seen, begin, scale, columns))
            masses, log2_sums = _masses(
                scores[:, :, :num_blocks], peak, seen, begin, columns, num_rows
            )
            return masses, log2_sums.reshape(batch, heads, chunk, num_rows)

        if steps == 1:
            results = [x[None] for x in step(jnp.int32(0))]
        else:
            results = lax.map(step, jnp.arange(steps))
        masses, log2_sums = (
            jnp.moveaxis(x, 0, 2).reshape(batch, heads, steps * chunk, -1)[:, :, :num_local]
            for x in results
        )
        if not levels:
            return masses
        # The minimum prevents contraction of the product with a sum that it feeds.
        largest = float(jnp.finfo(jnp.float32).max)
        return masses, jnp.minimum(log2_sums * (1 / (scale * LOG2E)), largest)


def parts_at_once(count: int, items: int, programs: int, room: float) -> int:
    """Returns how many parts of a causal sequence to score per step, in the least total time.

    Items are assigned round-robin, longest first, to `programs`. Part i of `count` sees i + 1
    parts. `room` parts fit in memory; up to twice as many are used if clearly faster.
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
    """Returns masses, fp32 [B, H, R / r, NB], and log2 of the rows' sums, fp32 [B, H, R]."""
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
    total = jnp.where(total > 0, total, 1.0)[:, :, None]  # for rows without keys
    shares = jnp.round(weights / total * float((1 << MASS_BITS) // num_rows)).astype(jnp.int32)
    block_shares = shares.reshape(*shares.shape[:3], -1, num_rows).sum(-1, dtype=jnp.int32)
    masses = jnp.swapaxes(block_shares.astype(jnp.float32) * 2.0**-MASS_BITS, 2, 3)
    return masses, (base + jnp.log2(total))[:, :, 0]
