"""Softmax masses of key blocks from the kernel's scores: `backends.BlockScores` on Hopper GPUs."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic_gpu import device
from pallas_kernels.mosaic_gpu.kernels.block_scores import (
    DEPTH,
    TILE_ROWS,
    BlockScoresConfig,
    block_scores_kernel,
)

_DTYPES = (jnp.bfloat16, jnp.float16)
_MOST_BLOCKS = 1 << 13  # more would overflow the sums of `_HIGH_BITS`
_HIGH_BITS = 17
_LOW_BITS = 13
_MASS_BITS = 30
_SCORE_BYTES = 1 << 29  # of scores in memory at a time
_INTERPRETED_MULTIPROCESSORS = 2


class HopperBlockScores:
    """The kernel behind the contract of `pallas_kernels.backends.BlockScores`."""

    def __init__(self, interpret: Any = False, config: BlockScoresConfig | None = None):
        self._interpret = interpret
        self._config = config or BlockScoresConfig()

    def unsupported(self, q: Array, k: Array) -> str | None:
        """See `BlockScores.unsupported`."""
        columns, length = k.shape[3:]
        if q.dtype not in _DTYPES or k.dtype != q.dtype:
            return f"dtypes {q.dtype} and {k.dtype} (bfloat16 or float16 is needed)"
        if length % DEPTH:
            return f"rows of {length} numbers (multiples of {DEPTH} are needed)"
        if columns % 8 or self._config.width % columns:
            return f"{columns} rows of keys in a block (8, 16, 32, 64 or 128 are needed)"
        if k.shape[2] > _MOST_BLOCKS:
            return f"{k.shape[2]} blocks of keys (at most {_MOST_BLOCKS} are possible)"
        return None

    def block_masses(self, q: Array, k: Array, places: Array, *, scale: float) -> Array:
        """See `BlockScores.block_masses`; masses are multiples of 2^-30."""
        batch, heads, num_local, num_rows, length = q.shape
        num_blocks, columns = k.shape[2:4]
        # As many rows of blocks at a time as make whole tiles of rows.
        whole = TILE_ROWS // math.gcd(TILE_ROWS, num_rows)
        of_one = 4 * batch * heads * num_rows * num_blocks
        steps = max(1, -(-(num_local * of_one) // _SCORE_BYTES))
        chunk = -(-num_local // (steps * whole)) * whole
        steps = -(-num_local // chunk)
        padding = steps * chunk - num_local
        q = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0), (0, 0)))
        places = jnp.pad(places, ((0, padding), (0, 0)), constant_values=-1)
        k = k.reshape(*k.shape[:2], -1, length)
        k = jnp.pad(k, ((0, 0), (0, 0), (0, -k.shape[2] % self._config.width), (0, 0)))

        def step(i: Array) -> Array:
            own = lax.dynamic_slice_in_dim(q, i * chunk, chunk, axis=2)
            seen = lax.dynamic_slice_in_dim(places, i * chunk, chunk).reshape(-1)
            scores, peak = block_scores_kernel(
                own.reshape(batch, heads, -1, length), k, seen, scale=scale,
                block_columns=columns, config=self._config,
                num_blocks=self._multiprocessors(), interpret=self._interpret,
            )
            return _masses(scores[:, :, :num_blocks], peak, seen, columns, num_rows)

        found = step(jnp.int32(0))[None] if steps == 1 else lax.map(step, jnp.arange(steps))
        found = jnp.moveaxis(found, 0, 2).reshape(batch, heads, steps * chunk, num_blocks)
        return found[:, :, :num_local]

    def _multiprocessors(self) -> int:
        return _INTERPRETED_MULTIPROCESSORS if self._interpret else device.multiprocessors()


def _masses(scores: Array, peak: Array, places: Array, columns: int, num_rows: int) -> Array:
    """Mean over the rows of a block of their softmax over key blocks.

    Sums are sums of integers, whose order means nothing.

    Args:
        scores: fp32 [B, H, NB, R], as the kernel gives them.
        peak: fp32 [B, H, R].
        places: int32 [R].
        columns: c, of one key block.
        num_rows: r, rows of one block of queries.

    Returns:
        fp32 [B, H, R / r, NB].
    """
    num_blocks = scores.shape[2]
    starts = jnp.arange(num_blocks, dtype=jnp.int32)[:, None] * columns
    # A block is at most `columns` times as heavy as its heaviest column.
    base = jnp.where(peak > -jnp.inf, peak, 0.0)[:, :, None] + (columns - 1).bit_length()
    weights = jnp.where(starts <= places, jnp.exp2(jnp.minimum(scores - base, 0.0)), 0.0)
    in_high_units = weights * 2.0**_HIGH_BITS
    high = in_high_units.astype(jnp.int32)
    low = jnp.round((in_high_units - high.astype(jnp.float32)) * 2.0**_LOW_BITS).astype(jnp.int32)
    high, low = (x.sum(2, dtype=jnp.int32).astype(jnp.float32) for x in (high, low))
    # The product is exact (a power of two), so contraction cannot change this sum.
    total = (high + low * 2.0**-_LOW_BITS) * 2.0**-_HIGH_BITS
    total = jnp.where(total > 0, total, 1.0)[:, :, None]  # of a row that sees nothing
    shares = jnp.round(weights / total * float((1 << _MASS_BITS) // num_rows)).astype(jnp.int32)
    of_blocks = shares.reshape(*shares.shape[:3], -1, num_rows).sum(-1, dtype=jnp.int32)
    return jnp.swapaxes(of_blocks.astype(jnp.float32) * 2.0**-_MASS_BITS, 2, 3)
