"""Kernel calls over arrays of one device: plan once, then run forward and backward."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import backends
from pallas_kernels.checks import Shaped
from pallas_kernels.interface import BackwardCall, ForwardCall, Gradients, Pair, Plan
from pallas_kernels.tiles import Columns, Tiles
from pallas_kernels.tiles.tiles import check_shape


@jax.numpy_rank_promotion("allow")
def plan(
    q: Shaped,
    k: Shaped,
    tiles: Tiles | None,
    columns: Columns | None = None,
    *,
    single_call: bool = False,
    backend: str | None = None,
) -> Plan:
    """Plans the kernels' work for `forward` and `backward`.

    Args:
        q: [B, nq, Hq, D], nq a multiple of the block size; only shape and dtype are read, as for k.
        k: [B, nk, Hk, D], nk a multiple of the block size, Hq a multiple of Hk.
        tiles: (query block, key block) tiles to compute, or None.
        columns: gathered columns to compute as well, or None.
        single_call: whether one call of `backward` returns complete gradients (its `key_dtype`).
        backend: name of a backend; None or "auto" for the fastest available one.

    Raises:
        ValueError: if shapes are invalid, or the backend cannot run here.
    """
    block_size = _check_plan(q, k, tiles, columns)
    runs = backends.resolve(backend, q, block_size)
    return Plan(
        work=runs.plan(q, k, tiles, columns, single_call=single_call),
        columns=columns,
        backend=runs.name,
        block_size=block_size,
        has_tiles=tiles is not None,
        query_shape=tuple(q.shape),
        key_shape=tuple(k.shape),
    )


@jax.numpy_rank_promotion("allow")
def forward(
    q: Array,
    k: Array,
    v: Array,
    plan: Plan,
    column_kv: Pair | None = None,
    *,
    scale: float | None = None,
    init: Pair | None = None,
    out_dtype: jnp.dtype | None = None,
    overlaps_collectives: bool = False,
) -> Pair:
    """Computes attention of one shard of queries to one shard of keys and to gathered columns.

    One softmax runs over the union of the plan's tiles and columns. Not differentiable: use
    `backward` for the gradients.

    Args:
        q: [B, nq, Hq, D].
        k, v: [B, nk, Hk, D].
        plan: from `plan`.
        column_kv: keys and values of the columns, [B, Mv, Hq, D] each; None if the plan has none.
        scale: scale of the logits; defaults to 1/sqrt(D).
        init: a running result to merge with: normalized output, fp32 [B, nq, Hq, D], and its lse,
            fp32 [B, Hq, nq] (-inf where nothing was computed yet).
        out_dtype: dtype of the output; defaults to fp32 with `init`, else that of q.
        overlaps_collectives: whether collectives run concurrently and occupy some of a GPU's
            multiprocessors. The work is then split into smaller parts that the others can take
            over, at the cost of starting more thread blocks.

    Returns:
        out [B, nq, Hq, D]; lse fp32 [B, Hq, nq], natural logarithm. Rows with nothing to compute
        have output 0 and lse -inf.

    Raises:
        ValueError: if the arrays do not match the plan.
    """
    _check_call(plan, q, k, v, column_kv)
    if init is not None:
        check_shape("init's output", init[0], q.shape)
        check_shape("init's lse", init[1], (q.shape[0], q.shape[2], q.shape[1]))
    if out_dtype is None:
        out_dtype = q.dtype if init is None else jnp.float32
    dtype, scale = jnp.dtype(out_dtype), scale_of(scale, q)
    call = ForwardCall(q, k, v, plan, column_kv, scale, init, dtype, overlaps_collectives)
    return backends.named(plan.backend).forward(call)


@jax.numpy_rank_promotion("allow")
def backward(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    lse: Array,
    delta: Array,
    plan: Plan,
    column_kv: Pair | None = None,
    *,
    scale: float | None = None,
    dq_dtype: jnp.dtype = jnp.float32,
    key_dtype: jnp.dtype | None = None,
    overlaps_collectives: bool = False,
) -> Gradients:
    """Computes the gradients of `forward`'s contribution to an attention output.

    With the row's final lse and delta, the contributions of several calls (ring steps) add up.

    Args:
        q, k, v, plan, column_kv, scale, overlaps_collectives: as in `forward`.
        dout: [B, nq, Hq, D], gradient of the final output.
        lse: fp32 [B, Hq, nq], over everything the row attended to.
        delta: fp32 [B, Hq, nq], sum over D of dout * final output (`delta_of`).
        dq_dtype: dtype of dq; fp32 if the contributions of several calls are added.
        key_dtype: dtype of dk and dv if this call returns complete gradients. They then include
            the gradients of the columns, whose tokens must be positions in k. None keeps them
            separate, in fp32.

    Returns:
        `Gradients`; dk and dv are None without tiles.

    Raises:
        ValueError: if the arrays do not match the plan, or `key_dtype` is given without tiles.
    """
    _check_call(plan, q, k, v, column_kv)
    if key_dtype is not None and not plan.has_tiles:
        raise ValueError("key_dtype needs tiles; without them there are no dk and dv")
    row_stats = (q.shape[0], q.shape[2], q.shape[1])
    check_shape("dout", dout, q.shape)
    check_shape("lse", lse, row_stats)
    check_shape("delta", delta, row_stats)
    arrays, scale = (q, k, v, dout, lse, delta), scale_of(scale, q)
    dtypes = jnp.dtype(dq_dtype), None if key_dtype is None else jnp.dtype(key_dtype)
    call = BackwardCall(*arrays, plan, column_kv, scale, *dtypes, overlaps_collectives)
    return backends.named(plan.backend).backward(call)


@jax.numpy_rank_promotion("allow")
def delta_of(out: Array, dout: Array, *, backend: str | None = None) -> Array:
    """Computes delta, the sum over D of out * dout in fp32, which `backward` needs for every row.

    Takes [B, n, H, D] each; returns fp32 [B, H, n]. With GPU kernels a row's sum is bit-identical
    in every program.

    Raises:
        ValueError: if the shapes differ, or the backend cannot run here.
    """
    check_shape("dout", dout, out.shape)
    return backends.resolve(backend, dout, None).delta_of(out, dout)


def scale_of(scale: float | None, q: Array) -> float:
    """Returns the scale of the logits of queries [..., D] as a float; None is 1/sqrt(D)."""
    return q.shape[-1] ** -0.5 if scale is None else scale


def _check_plan(q: Shaped, k: Shaped, tiles: Tiles | None, columns: Columns | None) -> int:
    """Checks the arguments of `plan`, raising ValueError; returns the block size."""
    for name, x in (("q", q), ("k", k)):
        if len(x.shape) != 4:
            raise ValueError(f"{name} has shape {x.shape}; expected [batch, tokens, heads, dim]")
        if 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}; empty axes are not supported")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q has shape {q.shape} and k {k.shape}; batch and head dim must be equal")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads and k has {k.shape[2]}; the number of query heads must be a "
            "multiple of the number of key/value heads"
        )
    blocks = columns if tiles is None else tiles
    if blocks is None:
        raise ValueError("there is nothing to compute: pass tiles, columns or both")
    g = blocks.block_size
    for name, x in (("q", q), ("k", k)):
        if x.shape[1] % g:
            raise ValueError(
                f"{name} has {x.shape[1]} tokens; expected a multiple of block_size={g}"
            )
    (batch, num_queries, heads, _), num_keys = q.shape, k.shape[1]
    if tiles is not None:
        tiles.check(batch, heads, num_queries // g, num_keys // g)
    if columns is not None:
        if columns.block_size != g:
            raise ValueError(
                f"columns.block_size={columns.block_size} differs from the tiles' block_size={g}"
            )
        columns.check(batch, heads, num_queries // g)
    return g


def _check_call(plan: Plan, q: Array, k: Array, v: Array, column_kv: Pair | None) -> None:
    """Raises ValueError if the arrays do not match the plan; the message names the argument."""
    for name, x, shape in (
        ("q", q, plan.query_shape),
        ("k", k, plan.key_shape),
        ("v", v, plan.key_shape),
    ):
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}, but the plan is for {shape}")
    if (column_kv is None) != (plan.columns is None):
        given, planned = ("no", "with") if column_kv is None else ("a", "without")
        raise ValueError(f"{given} column_kv was passed to a plan {planned} columns")
    if column_kv is not None and plan.columns is not None:
        batch, _, heads, dim = plan.query_shape
        shape = (batch, plan.columns.tokens.shape[-1], heads, dim)
        for name, x in zip(("keys", "values"), column_kv, strict=True):
            if x.shape != shape:
                raise ValueError(f"column_kv: {name} have shape {x.shape}; expected {shape}")
