"""The forward pass of the XLA backend."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.interface import ForwardCall, Pair
from pallas_kernels.xla.products import (
    chunk_of,
    dot,
    finite,
    from_blocks,
    joined,
    logits_of,
    map_starts,
    slice_from,
    take_blocks,
    to_blocks,
)
from pallas_kernels.xla.walk import fold_columns


class _State(NamedTuple):
    """Running softmax of the rows of a chunk, [B, Hq, rows, g(, D)], fp32."""

    peak: Array
    total: Array
    acc: Array


def forward(call: ForwardCall) -> Pair:
    q, k, v, plan, column_kv, scale, init, out_dtype, _ = call
    g, walk, columns = plan.block_size, plan.work.rows, plan.columns
    q_blocks = to_blocks(q, g)  # [B, Hq, nQ, g, D]
    k_blocks, v_blocks = to_blocks(k, g), to_blocks(v, g)
    batch, heads, num_rows, _, dim = q_blocks.shape
    chunk = chunk_of(num_rows)

    def chunk_forward(first_row: Array) -> tuple[Array, Array]:
        rows = first_row + jnp.arange(chunk, dtype=jnp.int32)
        q_rows = slice_from(q_blocks, first_row, chunk, axis=2)
        if init is None:
            stats = jnp.full((batch, heads, chunk, g), -jnp.inf, jnp.float32)
            state = _State(stats, jnp.zeros_like(stats), jnp.zeros((*stats.shape, dim)))
        else:
            out_rows = slice_from(init_blocks, first_row, chunk, axis=2)
            lse_rows = slice_from(init_lse, first_row, chunk, axis=2)
            state = _State(lse_rows, (lse_rows > -jnp.inf).astype(jnp.float32), out_rows)

        def add(keys: Array, values: Array, mask: Array, state: _State) -> _State:
            return _accumulate(state, logits_of(q_rows, keys, scale), mask, values)

        def tile_step(block: Array, mask: Array, state: _State) -> _State:
            keys, values = (take_blocks(x, block, heads) for x in (k_blocks, v_blocks))
            return add(keys, values, mask, state)

        if walk is not None:
            state = walk.fold(rows, tile_step, state)
        state = fold_columns(columns, column_kv, rows, add, state)
        seen = state.total > 0
        total = jnp.where(seen, state.total, 1.0)
        out = state.acc / total[..., None]
        lse = jnp.where(seen, finite(state.peak) + jnp.log(total), -jnp.inf)
        return out.astype(out_dtype), lse

    if init is not None:
        init_blocks = to_blocks(init[0].astype(jnp.float32), g)
        init_lse = init[1].reshape(batch, heads, num_rows, g)
    out, lse = map_starts(chunk_forward, num_rows, chunk)  # leading axis: chunks
    return from_blocks(joined(out)), joined(lse).reshape(batch, heads, -1)


def _accumulate(state: _State, logits: Array, mask: Array, values: Array) -> _State:
    logits = jnp.where(mask, logits, -jnp.inf)
    peak = jnp.maximum(state.peak, logits.max(-1))
    weights = jnp.exp(logits - finite(peak)[..., None])
    decay = jnp.exp(state.peak - finite(peak))
    values = jnp.broadcast_to(values, (*weights.shape[:3], *values.shape[3:]))
    acc = dot("bhiqk,bhikd->bhiqd", weights.astype(values.dtype), values)
    return _State(peak, state.total * decay + weights.sum(-1), state.acc * decay[..., None] + acc)
