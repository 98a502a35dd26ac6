"""The backward pass of the XLA backend."""

from typing import NamedTuple, Self

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.interface import BackwardCall, Gradients, whole_keys
from pallas_kernels.tiles import COLUMN_TILE, Columns
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
from pallas_kernels.xla.walk import Walk, column_tile, fold_columns


def backward(call: BackwardCall) -> Gradients:
    q, k, v, dout, lse, delta, plan, column_kv, scale, dq_dtype, key_dtype, _ = call
    g, walks, columns = plan.block_size, plan.work, plan.columns
    rows = _Rows(
        to_blocks(q, g),
        to_blocks(dout, g),
        lse.reshape(*lse.shape[:2], -1, g),
        delta.reshape(*delta.shape[:2], -1, g),
    )
    k_blocks, v_blocks = to_blocks(k, g), to_blocks(v, g)
    dq = _backward_rows(rows, k_blocks, v_blocks, walks.rows, columns, column_kv, scale)
    dq = dq.astype(dq_dtype)
    dk = dv = dk_columns = dv_columns = None
    if walks.columns is not None:
        dk, dv = _backward_keys(rows, k_blocks, v_blocks, walks.columns, scale)
    if columns is not None and column_kv is not None:
        dk_columns, dv_columns = _backward_columns(rows, columns, column_kv, scale)
    grads = Gradients(dq, dk, dv, dk_columns, dv_columns)
    return grads if key_dtype is None else whole_keys(grads, columns, key_dtype)


class _Rows(NamedTuple):
    """Inputs of the backward pass per query, [B, Hq, nQ, g(, D)]."""

    q: Array
    dout: Array
    lse: Array
    delta: Array

    def slice(self, first: Array, size: int) -> Self:
        return self._make(slice_from(x, first, size, axis=2) for x in self)

    def take(self, blocks: Array) -> Self:
        heads = self.q.shape[1]
        return self._make(take_blocks(x, blocks, heads) for x in self)


def _backward_rows(
    rows: _Rows,
    k_blocks: Array,
    v_blocks: Array,
    walk: Walk | None,
    columns: Columns | None,
    column_kv: tuple[Array, Array] | None,
    scale: float,
) -> Array:
    batch, heads, num_rows, g, dim = rows.q.shape
    chunk = chunk_of(num_rows)

    def chunk_dq(first_row: Array) -> Array:
        numbers = first_row + jnp.arange(chunk, dtype=jnp.int32)
        part = rows.slice(first_row, chunk)
        dq = jnp.zeros((batch, heads, chunk, g, dim), jnp.float32)

        def add(keys: Array, values: Array, mask: Array, dq: Array) -> Array:
            _, ds = _probabilities(part, keys, values, mask, scale)
            return dq + dot("bhiqk,bhikd->bhiqd", ds.astype(keys.dtype), keys)

        def tile_step(block: Array, mask: Array, dq: Array) -> Array:
            keys, values = (take_blocks(x, block, heads) for x in (k_blocks, v_blocks))
            return add(keys, values, mask, dq)

        if walk is not None:
            dq = walk.fold(numbers, tile_step, dq)
        return fold_columns(columns, column_kv, numbers, add, dq)

    dq = map_starts(chunk_dq, num_rows, chunk)
    return from_blocks(joined(dq))


def _backward_keys(
    rows: _Rows, k_blocks: Array, v_blocks: Array, walk: Walk, scale: float
) -> tuple[Array, Array]:
    batch, heads, _, g, dim = rows.q.shape
    kv_heads, num_columns = k_blocks.shape[1:3]
    chunk = chunk_of(num_columns)
    group = heads // kv_heads

    def chunk_dkv(first: Array) -> tuple[Array, Array]:
        numbers = first + jnp.arange(chunk, dtype=jnp.int32)
        own = jnp.broadcast_to(numbers, (batch, heads, chunk))
        keys, values = (take_blocks(x, own, heads) for x in (k_blocks, v_blocks))

        def tile_step(block: Array, mask: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            part = rows.take(block)
            p, ds = _probabilities(part, keys, values, mask, scale)
            dv = dot("bhiqk,bhiqd->bhikd", p.astype(values.dtype), part.dout)
            dk = dot("bhiqk,bhiqd->bhikd", ds.astype(keys.dtype), part.q)
            return carry[0] + _sum_group(dk, group), carry[1] + _sum_group(dv, group)

        zero = jnp.zeros((batch, kv_heads, chunk, g, dim), jnp.float32)
        return walk.fold(numbers, tile_step, (zero, zero))

    dk, dv = map_starts(chunk_dkv, num_columns, chunk)
    return from_blocks(joined(dk)), from_blocks(joined(dv))


def _backward_columns(
    rows: _Rows, columns: Columns, column_kv: tuple[Array, Array], scale: float
) -> tuple[Array, Array]:
    batch, heads, num_rows, _, dim = rows.q.shape
    chunk = chunk_of(num_rows)

    def tile_dkv(tile: Array) -> tuple[Array, Array]:
        def row_step(step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            numbers = step * chunk + jnp.arange(chunk, dtype=jnp.int32)
            part = rows.slice(step * chunk, chunk)
            keys, values, mask = column_tile(columns, column_kv, tile, numbers)
            p, ds = _probabilities(part, keys, values, mask, scale)
            dv = dot("bhiqk,bhiqd->bhkd", p.astype(values.dtype), part.dout)
            dk = dot("bhiqk,bhiqd->bhkd", ds.astype(keys.dtype), part.q)
            return carry[0] + dk, carry[1] + dv

        zero = jnp.zeros((batch, heads, COLUMN_TILE, dim), jnp.float32)
        needed = tile * COLUMN_TILE < jnp.max(columns.count, initial=0)
        steps = jnp.where(needed, num_rows // chunk, 0)
        if columns.ends is not None:
            end = jnp.max(columns.ends[..., tile])
            steps = jnp.minimum(steps, (end + chunk - 1) // chunk)
        return lax.fori_loop(0, steps, row_step, (zero, zero))

    num_tiles = columns.tokens.shape[-1] // COLUMN_TILE
    # [tiles, B, Hq, T, D] -> [B, tiles * T, Hq, D]
    dk, dv = (
        jnp.transpose(x, (1, 0, 3, 2, 4)).reshape(batch, -1, heads, dim)
        for x in map_starts(tile_dkv, num_tiles, 1)
    )
    return dk, dv


def _probabilities(
    rows: _Rows, keys: Array, values: Array, mask: Array, scale: float
) -> tuple[Array, Array]:
    seen = rows.lse > -jnp.inf
    p = jnp.exp(logits_of(rows.q, keys, scale) - finite(rows.lse)[..., None])
    p = jnp.where(mask & seen[..., None], p, 0.0)
    values = jnp.broadcast_to(values, (*p.shape[:3], *values.shape[3:]))
    dp = dot("bhiqd,bhikd->bhiqk", rows.dout, values)
    return p, scale * p * (dp - rows.delta[..., None])


def _sum_group(x: Array, group: int) -> Array:
    return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)
