"""The XLA backend: blockwise sparse attention on any platform.

Query blocks are taken a few at a time; for each, a loop with a dynamic trip count walks the
listed key blocks, so the largest intermediate is one tile per (head, query block) of the chunk
and no S x S array exists. Gradients are explicit: the loops are not differentiated by JAX.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.gradients import Gradients, whole_keys
from pallas_kernels.index import BlockSparseIndex
from pallas_kernels.tiles import COLUMN_TILE, SegmentedDiagonals, Tiles, VerticalColumns

_ROWS_PER_CHUNK = 16  # bounds memory: chunk * g * g floats per head


class _State(NamedTuple):
    """Running softmax of the rows of a chunk, [B, Hq, rows, g(, D)], fp32."""

    peak: Array
    total: Array
    acc: Array


def forward(
    q: Array, k: Array, v: Array, tiles: Tiles | None, verticals: VerticalColumns | None,
    *, scale: float, init: tuple[Array, Array] | None, out_dtype: jnp.dtype,
    beside_transfers: bool = False,
) -> tuple[Array, Array]:
    """See `pallas_kernels.ops.forward`."""
    del beside_transfers
    g = _block_size(tiles, verticals)
    q_blocks = _to_blocks(q, g)  # [B, Hq, nQ, g, D]
    k_blocks, v_blocks = _to_blocks(k, g), _to_blocks(v, g)
    walk = None if tiles is None else _RowWalk(tiles, q_blocks.shape[2], k_blocks.shape[2])
    batch, heads, num_rows, _, dim = q_blocks.shape
    chunk = _chunk(num_rows)

    def chunk_forward(first_row: Array) -> tuple[Array, Array]:
        rows = first_row + jnp.arange(chunk, dtype=jnp.int32)
        q_rows = lax.dynamic_slice_in_dim(q_blocks, first_row, chunk, axis=2)
        if init is None:
            stats = jnp.full((batch, heads, chunk, g), -jnp.inf, jnp.float32)
            state = _State(stats, jnp.zeros_like(stats), jnp.zeros((*stats.shape, dim)))
        else:
            out_rows = lax.dynamic_slice_in_dim(init_blocks, first_row, chunk, axis=2)
            lse_rows = lax.dynamic_slice_in_dim(init_lse, first_row, chunk, axis=2)
            state = _State(lse_rows, (lse_rows > -jnp.inf).astype(jnp.float32), out_rows)
        if walk is not None:

            def tile_step(block: Array, mask: Array, state: _State) -> _State:
                keys, values = _take(k_blocks, block, heads), _take(v_blocks, block, heads)
                return _accumulate(state, _logits(q_rows, keys, scale), mask, values)

            state = walk.fold(rows, tile_step, state)
        if verticals is not None:

            def column_step(tile: Array, state: _State) -> _State:
                keys, values, mask = _columns(verticals, tile, rows)
                return _accumulate(state, _logits(q_rows, keys, scale), mask, values)

            state = lax.fori_loop(0, _num_column_tiles(verticals, rows), column_step, state)
        seen = state.total > 0
        total = jnp.where(seen, state.total, 1.0)
        out = state.acc / total[..., None]
        lse = jnp.where(seen, _finite(state.peak) + jnp.log(total), -jnp.inf)
        return out.astype(out_dtype), lse

    if init is not None:
        init_blocks = _to_blocks(init[0].astype(jnp.float32), g)
        init_lse = init[1].reshape(batch, heads, num_rows, g)
    starts = jnp.arange(0, num_rows, chunk, dtype=jnp.int32)
    out, lse = lax.map(chunk_forward, starts)  # leading axis: chunks
    out = jnp.moveaxis(out, 0, 2).reshape(batch, heads, num_rows, g, dim)
    lse = jnp.moveaxis(lse, 0, 2).reshape(batch, heads, num_rows * g)
    return _from_blocks(out), lse


def backward(
    q: Array, k: Array, v: Array, dout: Array, lse: Array, delta: Array,
    tiles: Tiles | None, verticals: VerticalColumns | None, *, scale: float,
    dq_dtype: jnp.dtype = jnp.float32, key_dtype: jnp.dtype | None = None,
    beside_transfers: bool = False,
) -> Gradients:
    """See `pallas_kernels.ops.backward`."""
    del beside_transfers
    g = _block_size(tiles, verticals)
    rows = _Rows(
        _to_blocks(q, g),
        _to_blocks(dout, g),
        lse.reshape(*lse.shape[:2], -1, g),
        delta.reshape(*delta.shape[:2], -1, g),
    )
    k_blocks, v_blocks = _to_blocks(k, g), _to_blocks(v, g)
    dq = _backward_rows(rows, k_blocks, v_blocks, tiles, verticals, scale).astype(dq_dtype)
    dk = dv = dk_columns = dv_columns = None
    if tiles is not None:
        dk, dv = _backward_keys(rows, k_blocks, v_blocks, tiles, scale)
    if verticals is not None:
        dk_columns, dv_columns = _backward_columns(rows, verticals, scale)
    if key_dtype is not None:
        dk, dv = whole_keys(dk, dv, dk_columns, dv_columns, verticals, key_dtype)
        dk_columns = dv_columns = None
    return Gradients(dq, dk, dv, dk_columns, dv_columns)


def delta_of(out: Array, dout: Array) -> Array:
    """See `pallas_kernels.ops.delta_of`."""
    return jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1).swapaxes(1, 2)


class _Rows(NamedTuple):
    """What the backward pass needs of the queries, [B, Hq, nQ, g(, D)]."""

    q: Array
    dout: Array
    lse: Array
    delta: Array

    def slice(self, first: Array, size: int) -> "_Rows":
        return _Rows(*(lax.dynamic_slice_in_dim(x, first, size, axis=2) for x in self))

    def take(self, blocks: Array) -> "_Rows":
        heads = self.q.shape[1]
        return _Rows(*(_take(x, blocks, heads) for x in self))


def _backward_rows(
    rows: _Rows, k_blocks: Array, v_blocks: Array, tiles: Tiles | None,
    verticals: VerticalColumns | None, scale: float,
) -> Array:
    batch, heads, num_rows, g, dim = rows.q.shape
    chunk = _chunk(num_rows)
    walk = None if tiles is None else _RowWalk(tiles, num_rows, k_blocks.shape[2])

    def chunk_dq(first_row: Array) -> Array:
        numbers = first_row + jnp.arange(chunk, dtype=jnp.int32)
        part = rows.slice(first_row, chunk)
        dq = jnp.zeros((batch, heads, chunk, g, dim), jnp.float32)
        if walk is not None:

            def tile_step(block: Array, mask: Array, dq: Array) -> Array:
                keys, values = _take(k_blocks, block, heads), _take(v_blocks, block, heads)
                _, ds = _probabilities(part, keys, values, mask, scale)
                return dq + _dot("bhiqk,bhikd->bhiqd", ds.astype(keys.dtype), keys)

            dq = walk.fold(numbers, tile_step, dq)
        if verticals is not None:

            def column_step(tile: Array, dq: Array) -> Array:
                keys, values, mask = _columns(verticals, tile, numbers)
                _, ds = _probabilities(part, keys, values, mask, scale)
                return dq + _dot("bhiqk,bhikd->bhiqd", ds.astype(keys.dtype), keys)

            dq = lax.fori_loop(0, _num_column_tiles(verticals, numbers), column_step, dq)
        return dq

    dq = lax.map(chunk_dq, jnp.arange(0, num_rows, chunk, dtype=jnp.int32))
    return _from_blocks(jnp.moveaxis(dq, 0, 2).reshape(batch, heads, num_rows, g, dim))


def _backward_keys(
    rows: _Rows, k_blocks: Array, v_blocks: Array, tiles: Tiles, scale: float
) -> tuple[Array, Array]:
    """dk, dv by walking, for each key block, the query blocks that see it."""
    batch, heads, num_rows, g, dim = rows.q.shape
    kv_heads, num_columns = k_blocks.shape[1:3]
    chunk = _chunk(num_columns)
    walk = _ColumnWalk(tiles, num_rows, num_columns)
    group = heads // kv_heads

    def chunk_dkv(first: Array) -> tuple[Array, Array]:
        numbers = first + jnp.arange(chunk, dtype=jnp.int32)
        own = jnp.broadcast_to(numbers, (batch, heads, chunk))
        keys, values = _take(k_blocks, own, heads), _take(v_blocks, own, heads)

        def tile_step(
            block: Array, mask: Array, carry: tuple[Array, Array]
        ) -> tuple[Array, Array]:
            part = rows.take(block)
            p, ds = _probabilities(part, keys, values, mask, scale)
            dv = _dot("bhiqk,bhiqd->bhikd", p.astype(values.dtype), part.dout)
            dk = _dot("bhiqk,bhiqd->bhikd", ds.astype(keys.dtype), part.q)
            return carry[0] + _sum_group(dk, group), carry[1] + _sum_group(dv, group)

        zero = jnp.zeros((batch, kv_heads, chunk, g, dim), jnp.float32)
        return walk.fold(numbers, tile_step, (zero, zero))

    dk, dv = lax.map(chunk_dkv, jnp.arange(0, num_columns, chunk, dtype=jnp.int32))
    shape = (batch, kv_heads, num_columns, g, dim)
    return tuple(_from_blocks(jnp.moveaxis(x, 0, 2).reshape(shape)) for x in (dk, dv))


def _backward_columns(
    rows: _Rows, verticals: VerticalColumns, scale: float
) -> tuple[Array, Array]:
    """Gradients of gathered columns, [B, Mv, Hq, D], by walking all query blocks."""
    batch, heads, num_rows, _, dim = rows.q.shape
    chunk = _chunk(num_rows)

    def tile_dkv(tile: Array) -> tuple[Array, Array]:
        def row_step(step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            numbers = step * chunk + jnp.arange(chunk, dtype=jnp.int32)
            part = rows.slice(step * chunk, chunk)
            keys, values, mask = _columns(verticals, tile, numbers)
            p, ds = _probabilities(part, keys, values, mask, scale)
            dv = _dot("bhiqk,bhiqd->bhkd", p.astype(values.dtype), part.dout)
            dk = _dot("bhiqk,bhiqd->bhkd", ds.astype(keys.dtype), part.q)
            return carry[0] + dk, carry[1] + dv

        zero = jnp.zeros((batch, heads, COLUMN_TILE, dim), jnp.float32)
        needed = tile * COLUMN_TILE < jnp.max(verticals.count, initial=0)
        return lax.fori_loop(
            0, jnp.where(needed, num_rows // chunk, 0), row_step, (zero, zero)
        )

    num_tiles = verticals.tokens.shape[-1] // COLUMN_TILE
    dk, dv = lax.map(tile_dkv, jnp.arange(num_tiles, dtype=jnp.int32))
    # [tiles, B, Hq, T, D] -> [B, tiles * T, Hq, D]
    return tuple(
        jnp.transpose(x, (1, 0, 3, 2, 4)).reshape(batch, -1, heads, dim) for x in (dk, dv)
    )


class _RowWalk:
    """Key blocks of query blocks, slot by slot."""

    def __init__(self, tiles: Tiles, num_rows: int, num_columns: int):
        self.tiles, self.others = tiles, num_columns
        if isinstance(tiles, BlockSparseIndex):
            ranges = jnp.zeros_like(tiles.key_count), tiles.key_count
        else:
            ranges = tiles.row_ranges(num_rows, num_columns)
        if not isinstance(tiles, SegmentedDiagonals):
            ranges = (x[:, :, None] for x in ranges)
        self.first, self.last = ranges  # [B, Hq, runs, rows]

    def fold(self, rows: Array, step: Callable, state: Any) -> Any:
        """step(key block [B, Hq, rows], mask [B, Hq, rows, g|1, g|1], state) over all slots."""

        def run(number: Array | int, state: Any) -> Any:
            ranges = (
                _of_rows(lax.dynamic_index_in_dim(x, number, 2, keepdims=False), rows)
                for x in (self.first, self.last)
            )
            return _fold(tuple(ranges), self, rows, step, state)

        runs = self.first.shape[2]
        return run(0, state) if runs == 1 else lax.fori_loop(0, runs, run, state)

    def at(self, rows: Array, slot: Array) -> tuple[Array, Array]:
        """Key block of a slot, and whether it lies on the causal diagonal."""
        if isinstance(self.tiles, BlockSparseIndex):
            block = _of_rows(self.tiles.key_blocks, rows)[..., slot]
            return block, (block == rows) & self.tiles.causal
        offset = self.tiles.offsets[..., slot][..., None]
        return rows - offset, offset == self.tiles.diagonal


class _ColumnWalk:
    """Query blocks of key blocks, slot by slot."""

    def __init__(self, tiles: Tiles, num_rows: int, num_columns: int):
        self.tiles, self.others = tiles, num_rows
        if isinstance(tiles, BlockSparseIndex):
            self.first, self.last = jnp.zeros_like(tiles.query_count), tiles.query_count
        else:
            self.first, self.last = tiles.column_ranges(num_rows, num_columns)

    def fold(self, columns: Array, step: Callable, state: Any) -> Any:
        """step(query block [B, Hq, columns], its mask, state) over all slots."""
        ranges = _of_rows(self.first, columns), _of_rows(self.last, columns)
        return _fold(ranges, self, columns, step, state)

    def at(self, columns: Array, slot: Array) -> tuple[Array, Array]:
        """Query block of a slot, and whether it lies on the causal diagonal."""
        if isinstance(self.tiles, BlockSparseIndex):
            block = _of_rows(self.tiles.query_blocks, columns)[..., slot]
            return block, (block == columns) & self.tiles.causal
        offset = self.tiles.offsets[..., slot][..., None]
        return columns + offset, offset == self.tiles.diagonal


def _fold(
    ranges: tuple[Array, Array], walk: _RowWalk | _ColumnWalk, numbers: Array, step: Callable,
    state: Any,
) -> Any:
    """Visits the slots in the ranges [B, Hq, n] of some own blocks; blocks are clipped to exist."""
    first, last = ranges
    some = last > first
    lowest = jnp.min(jnp.where(some, first, jnp.iinfo(jnp.int32).max))
    g = walk.tiles.block_size
    below = jnp.tril(jnp.ones((g, g), bool))

    def visit(slot: Array, state: Any) -> Any:
        block, diagonal = walk.at(numbers, slot)
        listed = (slot >= first) & (slot < last)
        diagonal = jnp.broadcast_to(diagonal, listed.shape)[..., None, None]
        mask = listed[..., None, None] & (~diagonal | below)
        return step(jnp.clip(block, 0, walk.others - 1), mask, state)

    stop = jnp.max(jnp.where(some, last, 0))
    return lax.fori_loop(jnp.where(some.any(), lowest, 0), stop, visit, state)


def _of_rows(x: Array, rows: Array) -> Array:
    return lax.dynamic_slice_in_dim(x, rows[0], rows.size, axis=2)


def _columns(
    verticals: VerticalColumns, tile: Array, rows: Array
) -> tuple[Array, Array, Array]:
    """Keys, values [B, Hq, 1, T, D] and mask [B, Hq, rows, g, T] of one tile of columns."""
    start = tile * COLUMN_TILE
    keys, values = (
        lax.dynamic_slice_in_dim(x, start, COLUMN_TILE, axis=1).swapaxes(1, 2)[:, :, None]
        for x in (verticals.k, verticals.v)
    )
    words = lax.dynamic_slice_in_dim(
        _of_rows(verticals.keep, rows), start // 32, COLUMN_TILE // 32, axis=-1
    )
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    keep = bits.reshape(*words.shape[:-1], COLUMN_TILE).astype(bool)
    g = verticals.block_size
    blocks = lax.dynamic_slice_in_dim(verticals.query_blocks, rows[0], rows.size)
    position = blocks[:, None] * g + jnp.arange(g, dtype=jnp.int32)
    tokens = lax.dynamic_slice_in_dim(verticals.tokens, start, COLUMN_TILE, axis=-1)
    causal = tokens[:, :, None, None, :] <= position[:, :, None]
    return keys, values, keep[..., None, :] & causal


def _num_column_tiles(verticals: VerticalColumns, rows: Array) -> Array:
    limit = jnp.max(_of_rows(verticals.limit, rows), initial=0)
    return (limit + COLUMN_TILE - 1) // COLUMN_TILE


def _logits(q: Array, keys: Array, scale: float) -> Array:
    keys = jnp.broadcast_to(keys, (*q.shape[:3], *keys.shape[3:]))
    return scale * _dot("bhiqd,bhikd->bhiqk", q, keys)


def _accumulate(state: _State, logits: Array, mask: Array, values: Array) -> _State:
    logits = jnp.where(mask, logits, -jnp.inf)
    peak = jnp.maximum(state.peak, logits.max(-1))
    weights = jnp.exp(logits - _finite(peak)[..., None])
    decay = jnp.exp(state.peak - _finite(peak))
    values = jnp.broadcast_to(values, (*weights.shape[:3], *values.shape[3:]))
    acc = _dot("bhiqk,bhikd->bhiqd", weights.astype(values.dtype), values)
    return _State(
        peak, state.total * decay + weights.sum(-1), state.acc * decay[..., None] + acc
    )


def _probabilities(
    rows: _Rows, keys: Array, values: Array, mask: Array, scale: float
) -> tuple[Array, Array]:
    """P and dS = scale * P * (dP - delta) of a tile."""
    seen = rows.lse > -jnp.inf
    p = jnp.exp(_logits(rows.q, keys, scale) - _finite(rows.lse)[..., None])
    p = jnp.where(mask & seen[..., None], p, 0.0)
    values = jnp.broadcast_to(values, (*p.shape[:3], *values.shape[3:]))
    dp = _dot("bhiqd,bhikd->bhiqk", rows.dout, values)
    return p, scale * p * (dp - rows.delta[..., None])


def _dot(equation: str, a: Array, b: Array) -> Array:
    """An einsum that accumulates in fp32; fp32 operands are multiplied as fp32, not tf32."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jnp.einsum(
        equation, a.astype(dtype), b.astype(dtype), precision=precision,
        preferred_element_type=jnp.float32,
    )


def _finite(x: Array) -> Array:
    """Replaces -inf (an empty row so far) by 0, so that differences stay defined."""
    return jnp.where(x > -jnp.inf, x, 0.0)


def _take(blocks: Array, numbers: Array, num_heads: int) -> Array:
    """Blocks [B, Hk, n, ...] at numbers [B, Hq, rows] -> [B, Hq, rows, ...]."""
    group = num_heads // blocks.shape[1]
    batch = jnp.arange(blocks.shape[0], dtype=jnp.int32)[:, None, None]
    heads = (jnp.arange(num_heads, dtype=jnp.int32) // group)[None, :, None]
    return blocks[batch, heads, numbers]


def _sum_group(x: Array, group: int) -> Array:
    return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)


def _to_blocks(x: Array, g: int) -> Array:
    """[B, S, H, D] -> [B, H, S/g, g, D]."""
    batch, _, heads, dim = x.shape
    return x.reshape(batch, -1, g, heads, dim).transpose(0, 3, 1, 2, 4)


def _from_blocks(x: Array) -> Array:
    """[B, H, n, g, D] -> [B, S, H, D]."""
    batch, heads, _, _, dim = x.shape
    return x.transpose(0, 2, 3, 1, 4).reshape(batch, -1, heads, dim)


def _chunk(rows: int) -> int:
    return math.gcd(rows, _ROWS_PER_CHUNK)


def _block_size(tiles: Tiles | None, verticals: VerticalColumns | None) -> int:
    source = tiles if tiles is not None else verticals
    return source.block_size


