"""Softmax mass that rows of queries give to each key block.

All keys are in sequence order, and a row of blocks is scored from its own queries only. Scores are
bit-identical for any number of ranks by the rules of `estimate.py`: product shapes depend only on
the whole sequence, floats are combined elementwise or by a maximum, and sums are integer sums.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.selection.scores import estimate
from pallas_kernels import backends

# Bytes of fp32 logits in memory at a time. Larger values are not faster; smaller ones would leave
# products with few rows.
_LOGIT_BYTES = 1 << 28
# A step has at most this fraction of the sequence's rows of blocks, so that a rank with a small
# shard computes little padding.
_MOST_STEPS = 64


def block_masses(
    rows: Array,
    keys: Array,
    positions: Array,
    first_blocks: Array | None = None,
    *,
    scale: float,
    like: Array,
    backend: str | None,
) -> Array:
    """Computes the mean softmax mass that the rows of a block give to each key block.

    Args:
        rows: [B, Hq, n, r, E], r rows of each of n local query blocks.
        keys: [B, Hk, NB, c, E], c rows of each key block of the sequence, in order.
        positions: int32 [n, r] or [B or 1, n, r]: a row sees key row j of block b iff b * c + j <=
            its entry here; rows with -1 see nothing and contribute nothing.
        first_blocks: int32 [B, n], first key block that the rows of a block see; None for 0.
        scale: positive scale of the logits.
        like: [B, n, Hq, D], the queries of the attention, which determine the backend.
        backend: its name, or None for the fastest available one. If it has no kernels for this
            (`pallas_kernels.backends.BlockScores`), XLA computes it.

    Returns:
        fp32 [B, Hq, n, NB], multiples of 2^-30; a row sums to the fraction of its r rows that see
        any key, up to rounding.
    """
    positions = positions[None] if positions.ndim == 2 else positions
    kernels = _kernels(rows, keys, like, backend)
    if kernels is None:
        return _by_xla(rows, keys, positions, first_blocks, scale)[0]
    return kernels.block_masses(rows, keys, positions, first_blocks, scale=scale, levels=False)


def block_masses_and_levels(
    rows: Array,
    keys: Array,
    positions: Array,
    first_blocks: Array | None = None,
    *,
    scale: float,
    like: Array,
    backend: str | None,
) -> tuple[Array, Array]:
    """Returns `block_masses`, and fp32 [B, Hq, n, r]: the product q k of weight 1 in each row."""
    kernels = _kernels(rows, keys, like, backend)
    if kernels is None:
        return _by_xla(rows, keys, positions, first_blocks, scale)
    return kernels.block_masses(rows, keys, positions, first_blocks, scale=scale, levels=True)


def _kernels(rows: Array, keys: Array, like: Array, backend: str | None) -> Any:
    block_size = like.shape[1] // rows.shape[2]
    return backends.block_score_kernels(backend, like, block_size, rows, keys)


def by_blocks(x: Array, block_size: int) -> Array:
    """Reshapes [B, n, H, D] to [B, H, n/g, g, D]."""
    x = x.reshape(x.shape[0], -1, block_size, *x.shape[2:])
    return x.transpose(0, 3, 1, 2, 4)


def without_padding(x: Array, block_ids: Array, ends: Array) -> Array:
    """Zeroes tokens [B, n, H, D] of blocks at positions from `SelectionContext.ends` on."""
    size = x.shape[1] // block_ids.shape[0]
    positions = block_ids[:, None] * size + jnp.arange(size, dtype=jnp.int32)
    counts = positions < ends[..., None]
    return jnp.where(counts.reshape(ends.shape[0], -1)[..., None, None], x, 0)


def rows_at_once(batch: int, heads: int, num_rows: int, num_blocks: int, num_keys: int) -> int:
    """Returns the rows of blocks per step: a function of the whole sequence, not of the shard."""
    bytes_per_row = 4 * batch * heads * num_rows * num_blocks * num_keys
    return max(min(_LOGIT_BYTES // bytes_per_row, num_blocks // _MOST_STEPS), 1)


def _by_xla(
    rows: Array, keys: Array, positions: Array, first_blocks: Array | None, scale: float
) -> tuple[Array, Array]:
    """Computes `block_masses` with levels in XLA, some rows of blocks at a time."""
    batch, heads, num_local, num_rows, dim = rows.shape
    kv_heads, num_blocks, num_keys = keys.shape[1:4]
    chunk = rows_at_once(batch, heads, num_rows, num_blocks, num_keys)
    steps = -(-num_local // chunk)
    padding = steps * chunk - num_local
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, padding), (0, 0), (0, 0)))
    positions = jnp.pad(positions, ((0, 0), (0, padding), (0, 0)), constant_values=-1)
    if first_blocks is not None:
        first_keys = jnp.pad(first_blocks * num_keys, ((0, 0), (0, padding)))
    keys = keys.reshape(batch, kv_heads, num_blocks * num_keys, dim)
    # bf16 products are exact in fp32; only fp32 inputs need the slower passes.
    precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
    key_numbers = jnp.arange(num_blocks * num_keys, dtype=jnp.int32)

    def step(i: Array) -> tuple[Array, Array]:
        part = lax.dynamic_slice_in_dim(rows, i * chunk, chunk, axis=2)
        seen = (
            lax.dynamic_slice_in_dim(positions, i * chunk, chunk, axis=1)[..., None] >= key_numbers
        )
        if first_blocks is not None:
            first = lax.dynamic_slice_in_dim(first_keys, i * chunk, chunk, axis=1)
            seen &= key_numbers >= first[:, :, None, None]
        logits = lax.dot_general(
            part.reshape(batch, kv_heads, -1, dim),
            keys,
            (((3,), (3,)), ((0, 1), (0, 1))),
            precision=precision,
            preferred_element_type=jnp.float32,
        ).reshape(batch, heads, chunk, num_rows, num_blocks * num_keys)
        logits = jnp.where(seen[:, None], logits, -jnp.inf)
        return _masses(logits.reshape(*logits.shape[:-1], num_blocks, num_keys), scale)

    results = lax.map(step, jnp.arange(steps))  # [steps, B, Hq, chunk, NB or r]
    masses, levels = (
        jnp.moveaxis(x, 0, 2).reshape(batch, heads, steps * chunk, -1)[:, :, :num_local]
        for x in results
    )
    return masses, levels


def _masses(logits: Array, scale: float) -> tuple[Array, Array]:
    """Returns the mean softmax mass by block of logits [..., r, NB, c], and the levels of rows."""
    num_rows, _, num_keys = logits.shape[-3:]
    # Keeps the sum of a block's terms, each at most one, within 2^30.
    term_one = float(1 << (estimate.MASS_BITS - (num_keys - 1).bit_length()))
    block_peak = logits.max(-1)
    terms = estimate.relative_exp(logits, block_peak[..., None], scale)
    in_block = jnp.round(terms * term_one).astype(jnp.int32).sum(-1, dtype=jnp.int32)
    in_block = in_block.astype(jnp.float32) * (1 / term_one)
    peak = block_peak.max(-1, keepdims=True)
    weight = estimate.relative_exp(block_peak, peak, scale)
    limbs = estimate.to_limbs(weight, in_block)
    total = estimate.from_limbs(*(x.sum(-1, keepdims=True, dtype=jnp.uint32) for x in limbs))
    total = jnp.where(total > 0, total, 1.0)  # for rows without keys
    one = float(estimate.MASS_ONE // num_rows)
    mass = jnp.round(weight * in_block / total * one).astype(jnp.int32).sum(-2, dtype=jnp.int32)
    # The maximum separates a product from an addition, which could be contracted otherwise.
    above = jnp.maximum(jnp.log(total) * (1 / scale), 0.0)
    return mass.astype(jnp.float32) * (1 / estimate.MASS_ONE), (peak + above)[..., 0]
