"""Sparse attention over arrays of one device: dispatch by backend, and gradients."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.backends import resolve
from pallas_kernels.checks import check_call, check_shape
from pallas_kernels.gradients import Gradients
from pallas_kernels.index import BlockSparseIndex, VerticalSlashIndex
from pallas_kernels.tiles import (
    DiagonalTiles,
    Tiles,
    VerticalColumns,
    gather_columns,
    pad_columns,
    vertical_columns,
)


def forward(
    q: Array,
    k: Array,
    v: Array,
    tiles: Tiles | None,
    verticals: VerticalColumns | None = None,
    *,
    scale: float | None = None,
    init: tuple[Array, Array] | None = None,
    out_dtype: jnp.dtype | None = None,
    beside_transfers: bool = False,
    backend: str | None = None,
) -> tuple[Array, Array]:
    """Attention of one shard of queries to one shard of keys and to gathered columns.

    One softmax runs over the union of `tiles` and `verticals`. Not differentiable by itself:
    `backward` gives the gradients.

    Args:
        q: [B, nq, Hq, D], nq a multiple of the block size.
        k: [B, nk, Hk, D], nk a multiple of the block size, Hq a multiple of Hk.
        v: shape of k.
        tiles: which (query block, key block) tiles to compute; None for none.
        verticals: gathered columns to compute as well; None for none.
        scale: of the logits; default 1/sqrt(D).
        init: a running result to merge with: output fp32 [B, nq, Hq, D], normalised, and its
            lse fp32 [B, Hq, nq] (-inf where nothing was computed yet).
        out_dtype: default fp32 with `init`, else that of q.
        beside_transfers: whether collectives run at the same time. They take some of a GPU's
            multiprocessors for a while; the work is then cut into smaller parts, which the others
            take over, at the price of starting more thread blocks.
        backend: "xla", "mosaic_gpu" or None for the best that runs here.

    Returns:
        out [B, nq, Hq, D]; lse fp32 [B, Hq, nq], natural logarithm. A row with nothing to
        compute has output 0 and lse -inf.

    Raises:
        ValueError: on shapes that do not fit, or a backend that cannot run here.
    """
    check_call(q, k, v, tiles, verticals)
    if init is not None:
        check_shape("init's output", init[0], q.shape)
        check_shape("init's lse", init[1], (q.shape[0], q.shape[2], q.shape[1]))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if out_dtype is None:
        out_dtype = q.dtype if init is None else jnp.float32
    module = resolve(backend, q, _block_size(tiles, verticals))
    return module.forward(
        q, k, v, tiles, verticals, scale=scale, init=init, out_dtype=jnp.dtype(out_dtype),
        beside_transfers=beside_transfers,
    )


def backward(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    lse: Array,
    delta: Array,
    tiles: Tiles | None,
    verticals: VerticalColumns | None = None,
    *,
    scale: float | None = None,
    dq_dtype: jnp.dtype = jnp.float32,
    key_dtype: jnp.dtype | None = None,
    beside_transfers: bool = False,
    backend: str | None = None,
) -> Gradients:
    """Gradients of `forward`'s share of an attention output.

    With the row's final lse and delta, the contributions of several calls (ring steps) add up.

    Args:
        q: as in `forward`.
        k: as in `forward`.
        v: as in `forward`.
        dout: [B, nq, Hq, D], gradient of the final output.
        lse: fp32 [B, Hq, nq], over everything the row attended to.
        delta: fp32 [B, Hq, nq], sum over D of dout * final output (`delta_of`).
        tiles: as in `forward`.
        verticals: as in `forward`.
        scale: as in `forward`.
        dq_dtype: of dq; fp32 where the contributions of several calls are added.
        key_dtype: where one call gives the whole gradients, the dtype of dk and dv, which then
            hold the gradients of the columns as well; their tokens must be positions in k. None
            keeps them apart, in fp32.
        beside_transfers: as in `forward`.
        backend: as in `forward`.

    Returns:
        dq [B, nq, Hq, D]; dk, dv [B, nk, Hk, D], summed over the query heads of a group (None
        without tiles); fp32 dk_columns, dv_columns [B, Mv, Hq, D] (None without verticals, or
        with `key_dtype`).

    Raises:
        ValueError: on shapes that do not fit, `key_dtype` without tiles, or a backend that
            cannot run here.
    """
    check_call(q, k, v, tiles, verticals)
    if key_dtype is not None and tiles is None:
        raise ValueError("key_dtype needs tiles: without them there are no dk and dv")
    row_stats = (q.shape[0], q.shape[2], q.shape[1])
    check_shape("dout", dout, q.shape)
    check_shape("lse", lse, row_stats)
    check_shape("delta", delta, row_stats)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    module = resolve(backend, q, _block_size(tiles, verticals))
    return module.backward(
        q, k, v, dout, lse, delta, tiles, verticals, scale=scale, dq_dtype=jnp.dtype(dq_dtype),
        key_dtype=None if key_dtype is None else jnp.dtype(key_dtype),
        beside_transfers=beside_transfers,
    )


def _block_size(tiles: Tiles | None, verticals: VerticalColumns | None) -> int:
    return (tiles if tiles is not None else verticals).block_size


class Partial(NamedTuple):
    """A normalised partial result: out fp32 [B, n, H, D] and lse fp32 [B, H, n]."""

    out: Array
    lse: Array


def merge(a: Partial, b: Partial) -> Partial:
    """Combines two partial results over disjoint sets of keys, in fp32.

    lse = log(exp(a.lse) + exp(b.lse)); the outputs are weighted by exp(lse_i - lse). Rows
    that are empty on one side take the other side's values; empty on both stay empty.
    """
    lse = jnp.logaddexp(a.lse, b.lse)
    safe = jnp.where(lse > -jnp.inf, lse, 0.0)

    def weight(x: Partial) -> Array:
        return jnp.exp(x.lse - safe).swapaxes(1, 2)[..., None]

    return Partial(a.out * weight(a) + b.out * weight(b), lse)


def delta_of(out: Array, dout: Array, *, backend: str | None = None) -> Array:
    """Sum over D of out * dout, in fp32: what `backward` needs of every row.

    Args:
        out: [B, n, H, D], the final output.
        dout: its gradient, same shape.
        backend: as in `forward`.

    Returns:
        fp32 [B, H, n]. On Hopper GPUs a row's sum has the same bits in every program.

    Raises:
        ValueError: on shapes that differ, or a backend that cannot run here.
    """
    check_shape("dout", dout, out.shape)
    return resolve(backend, dout).delta_of(out, dout)


def vertical_slash_attention(
    q: Array, k: Array, v: Array, index: VerticalSlashIndex, *,
    scale: float | None = None, backend: str | None = None, return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Causal attention restricted to the pairs of `index`, on one device; differentiable.

    Args:
        q: [B, S, Hq, D]; S a multiple of `index.block_size`.
        k: [B, S, Hk, D], Hq a multiple of Hk.
        v: shape of k.
        index: no gradient flows to it.
        scale: of the logits; default 1/sqrt(D).
        backend: as in `forward`.
        return_lse: whether to give the log of the softmax's denominator as well.

    Returns:
        [B, S, Hq, D] in the dtype of q. Contract of the mask: `VerticalSlashIndex`. With
        `return_lse`, a pair of it and fp32 [B, Hq, S], natural logarithm, -inf for empty rows;
        gradients flow through both.
    """
    result = _vertical_slash(q, k, v, index, scale, backend)
    return result if return_lse else result[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _vertical_slash(q, k, v, index, scale, backend):
    return _vertical_slash_fwd(q, k, v, index, scale, backend)[0]


def _vertical_slash_fwd(q, k, v, index, scale, backend):
    tiles, verticals = _resolve_index(q, k, v, index)
    out, lse = forward(q, k, v, tiles, verticals, scale=scale, backend=backend)
    out, lse = _named(out, lse)
    return (out, lse), (q, k, v, index, out, lse)


def _vertical_slash_bwd(scale, backend, residuals, cotangents):
    dout, dlse = cotangents
    q, k, v, index, out, lse = residuals
    # d lse / d logits are the softmax weights, so its cotangent joins delta in every kernel.
    tiles, verticals = _resolve_index(q, k, v, index)
    delta = delta_of(out, dout, backend=backend) - dlse
    grads = backward(
        q, k, v, dout, lse, delta, tiles, verticals, scale=scale, dq_dtype=q.dtype,
        key_dtype=k.dtype, backend=backend,
    )
    return grads.dq, grads.dk, grads.dv, None


_vertical_slash.defvjp(_vertical_slash_fwd, _vertical_slash_bwd)


def _resolve_index(
    q: Array, k: Array, v: Array, index: VerticalSlashIndex
) -> tuple[DiagonalTiles, VerticalColumns | None]:
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} tokens and k {k.shape[1]}: a vertical-slash index needs as "
            "many queries as keys"
        )
    check_shape("index.slash_count", index.slash_count, (q.shape[0], q.shape[2]))
    check_shape("index.vertical_count", index.vertical_count, (q.shape[0], q.shape[2]))
    tiles = DiagonalTiles.from_index(index)
    if index.vertical_tokens.shape[-1] == 0:
        return tiles, None
    num_blocks = q.shape[1] // index.block_size
    tokens = pad_columns(index)
    columns = vertical_columns(
        index,
        gather_columns(k, tokens),
        gather_columns(v, tokens),
        jnp.arange(num_blocks, dtype=jnp.int32),
        num_blocks,
    )
    return tiles, columns


def block_sparse_attention(
    q: Array, k: Array, v: Array, index: BlockSparseIndex, *,
    scale: float | None = None, backend: str | None = None, return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Attention restricted to the listed blocks of `index`, on one device; differentiable.

    Args:
        q: [B, Sq, Hq, D]; Sq a multiple of `index.block_size`.
        k: [B, Sk, Hk, D], Sk a multiple of `index.block_size`, Hq a multiple of Hk.
        v: shape of k.
        index: no gradient flows to it.
        scale: of the logits; default 1/sqrt(D).
        backend: as in `forward`.
        return_lse: as in `vertical_slash_attention`.

    Returns:
        [B, Sq, Hq, D] in the dtype of q. Contract of the mask: `BlockSparseIndex`. With
        `return_lse`, a pair of it and fp32 [B, Hq, Sq].
    """
    result = _tile_attention(q, k, v, index, scale, backend)
    return result if return_lse else result[0]


def dense_attention(
    q: Array, k: Array, v: Array, *, causal: bool = True, block_size: int = 128,
    scale: float | None = None, backend: str | None = None, return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Dense attention by the same kernels, every block listed: the limit of sparse.

    Shapes and `return_lse` as in `block_sparse_attention`; lengths must be multiples of
    `block_size`, and with `causal` equal.
    """
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"causal attention needs as many queries as keys, not {q.shape[1]} and {k.shape[1]}"
        )
    tiles = DiagonalTiles.full(
        q.shape[0], q.shape[2], q.shape[1] // block_size, k.shape[1] // block_size,
        block_size, causal,
    )
    result = _tile_attention(q, k, v, tiles, scale, backend)
    return result if return_lse else result[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _tile_attention(q, k, v, tiles, scale, backend):
    return _tile_attention_fwd(q, k, v, tiles, scale, backend)[0]


def _tile_attention_fwd(q, k, v, tiles, scale, backend):
    out, lse = forward(q, k, v, tiles, scale=scale, backend=backend)
    out, lse = _named(out, lse)
    return (out, lse), (q, k, v, tiles, out, lse)


def _tile_attention_bwd(scale, backend, residuals, cotangents):
    dout, dlse = cotangents
    q, k, v, tiles, out, lse = residuals
    delta = delta_of(out, dout, backend=backend) - dlse
    grads = backward(
        q, k, v, dout, lse, delta, tiles, scale=scale, dq_dtype=q.dtype, key_dtype=k.dtype,
        backend=backend,
    )
    return grads.dq, grads.dk, grads.dv, None


_tile_attention.defvjp(_tile_attention_fwd, _tile_attention_bwd)


def _named(out: Array, lse: Array) -> tuple[Array, Array]:
    """Names by which a rematerialisation policy can keep what the backward pass needs."""
    return checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
