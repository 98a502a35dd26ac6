"""Attention within a sliding window: block diagonals by a backend, and the far edge by XLA.

A window ends inside of tiles. These are one or two per query block; their logits are masked here,
and their result is what the backend's kernels start from. Gradients add up as in a ring.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import names, ops
from pallas_kernels.index.window import WindowIndex
from pallas_kernels.interface import Pair
from pallas_kernels.xla.products import (
    dot,
    finite,
    from_blocks,
    joined,
    map_starts,
    slice_from,
    to_blocks,
)

_LOGIT_BYTES = 1 << 28  # of the tiles that are computed at a time


@jax.numpy_rank_promotion("allow")
def window_attention(
    q: Array,
    k: Array,
    v: Array,
    index: WindowIndex,
    *,
    scale: float | None = None,
    backend: str | None = None,
) -> Pair:
    """Attention within a sliding window, on one device; differentiable.

    Args:
        q: [B, Sq, Hq, D], queries of the last Sq keys.
        k, v: [B, Sk, Hk, D]; Sq and Sk are multiples of the block size.
        index: of the Sk keys.
        scale, backend: as in `pallas_kernels.attention`.
    """
    lag = (k.shape[1] - q.shape[1]) // index.block_size
    tiles = index.near_tiles(lag)
    plan = None if tiles is None else ops.plan(q, k, tiles, backend=backend)
    edge = _Edge(index.near, index.last, index.window, lag, ops.scale_of(scale, q))
    return _attention(edge, backend, q, k, v, plan, index.first[:, 0, lag:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(edge, backend, q, k, v, plan, first):
    return _attention_fwd(edge, backend, q, k, v, plan, first)[0]


def _attention_fwd(edge, backend, q, k, v, plan, first):
    out, lse = edge.forward(q, k, v, first)
    if plan is not None:
        how = {"scale": edge.scale, "init": (out, lse), "out_dtype": q.dtype}
        out, lse = ops.forward(q, k, v, plan, **how)
    out = checkpoint_name(out.astype(q.dtype), names.OUTPUT)
    lse = checkpoint_name(lse, names.LSE)
    return (out, lse), (q, k, v, plan, first, out, lse)


def _attention_bwd(edge, backend, residuals, cotangents):
    dout, dlse = cotangents
    q, k, v, plan, first, out, lse = residuals
    # d lse / d logits are the softmax weights, so the cotangent of lse is folded into delta.
    delta = ops.delta_of(out, dout, backend=backend) - dlse
    grads = edge.backward(q, k, v, dout, lse, delta, first)
    if plan is not None:
        near = ops.backward(q, k, v, dout, lse, delta, plan, scale=edge.scale)
        grads = tuple(x + y for x, y in zip(grads, near[:3], strict=True))
    return *(x.astype(like.dtype) for x, like in zip(grads, (q, k, v), strict=True)), None, None


_attention.defvjp(_attention_fwd, _attention_bwd)


@dataclasses.dataclass(frozen=True)
class _Edge:
    """The tiles of block diagonals `start` to `last`, which queries see in part.

    `first`, int32 [B, n], is the first key block of the document of each query block.
    """

    start: int
    last: int
    window: int
    lag: int  # blocks of keys before the first query
    scale: float

    def forward(self, q: Array, k: Array, v: Array, first: Array) -> Pair:
        """Returns out, fp32 [B, Sq, Hq, D], and lse, fp32 [B, Hq, Sq]; 0 and -inf if empty."""
        tiles = _Tiles.of(self, k.shape[2], first, q, k, v)

        def attend(row: Array) -> Pair:
            (queries,), (keys, values), mask = tiles.of_rows(row)
            logits = jnp.where(mask, self.scale * dot(_LOGITS, queries, keys), -jnp.inf)
            peak = finite(logits.max(-1))
            weights = jnp.exp(logits - peak[..., None])
            total = weights.sum(-1)
            out = dot(_ROWS, values, weights.astype(v.dtype))
            seen = total > 0
            total = jnp.where(seen, total, 1.0)
            lse = jnp.where(seen, peak + jnp.log(total), -jnp.inf)
            return _of_heads(out / total[..., None]), _of_heads(lse)

        out, lse = tiles.map(attend)
        return from_blocks(out), lse.reshape(*lse.shape[:2], -1)

    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, lse: Array, delta: Array, first: Array
    ) -> tuple[Array, Array, Array]:
        """Returns the contributions of these tiles to dq, dk and dv, fp32."""
        rows = (x.swapaxes(1, 2)[..., None] for x in (lse, delta))
        tiles = _Tiles.of(self, k.shape[2], first, q, k, v, dout, *rows)

        def differentiate(row: Array) -> tuple[Array, Array, Array]:
            (queries, douts, lses, deltas), (keys, values), mask = tiles.of_rows(row)
            mask &= lses > -jnp.inf
            p = jnp.exp(self.scale * dot(_LOGITS, queries, keys) - finite(lses))
            p = jnp.where(mask, p, 0.0)
            ds = self.scale * p * (dot(_LOGITS, douts, values) - deltas)
            ds, p = ds.astype(k.dtype), p.astype(v.dtype)
            dq = _of_heads(dot(_ROWS, keys, ds))
            return dq, dot(_KEYS, ds, queries), dot(_KEYS, p, douts)

        dq, dk, dv = tiles.map(differentiate)
        return from_blocks(dq), tiles.to_keys(dk), tiles.to_keys(dv)


_LOGITS = "bhgnqd,bhnkd->bhgnqk"
_ROWS = "bhnkd,bhgnqk->bhgnqd"  # XLA on CPUs has no bf16 product of the reverse order
_KEYS = "bhgnqk,bhgnqd->bhnkd"


class _Tiles(NamedTuple):
    """Blocks of queries and of keys, with as many blocks before the keys as an edge may reach."""

    edge: _Edge
    first: Array
    rows: list[Array]  # [B, Hk, G, n, g, D or 1]
    keys: list[Array]  # [B, Hk, n', g, D]
    chunk: int  # query blocks at a time

    @classmethod
    def of(
        cls, edge: _Edge, kv_heads: int, first: Array, q: Array, k: Array, v: Array, *rows: Array
    ) -> Self:
        batch, blocks = first.shape
        size = q.shape[1] // blocks
        per_block = 4 * batch * q.shape[2] * size**2 * (edge.last - edge.start + 1)
        most = max(_LOGIT_BYTES // per_block, 1)
        chunk = math.gcd(blocks, 1 << most.bit_length() - 1)
        padding = [(0, 0), (0, 0), (max(edge.last - edge.lag, 0), 0), (0, 0), (0, 0)]
        queries = [to_blocks(x, size) for x in (q, *rows)]
        queries = [x.reshape(batch, kv_heads, -1, *x.shape[2:]) for x in queries]
        keys = [jnp.pad(to_blocks(x, size), padding) for x in (k, v)]
        return cls(edge, first, queries, keys, chunk)

    def of_rows(self, row: Array) -> tuple[list[Array], list[Array], Array]:
        """Returns a chunk of query blocks, the keys that each may see, and which it does."""
        edge, size, span = self.edge, self.rows[0].shape[-2], self.edge.last - self.edge.start + 1
        start = row + max(edge.lag - edge.last, 0)
        keys = []
        for x in self.keys:
            near = slice_from(x, start, self.chunk + span - 1, axis=2)
            keys.append(jnp.concatenate([near[:, :, n : n + self.chunk] for n in range(span)], 3))
        queries = [slice_from(x, row, self.chunk, axis=3) for x in self.rows]
        column = jnp.arange(span * size, dtype=jnp.int32)
        distance = jnp.arange(size, dtype=jnp.int32)[:, None] + edge.last * size - column
        inside = (distance >= 0) & (distance < edge.window)
        blocks = row + jnp.arange(self.chunk, dtype=jnp.int32)
        blocks = blocks[:, None] + edge.lag - edge.last + column // size
        own = blocks >= slice_from(self.first, row, self.chunk, axis=1)[..., None]
        return queries, keys, own[:, None, None, :, None] & inside

    def map(self, step: Callable[[Array], Any]) -> Any:
        """Joins step(first block) of all chunks, arrays [B, H, chunk, ...]."""
        results = map_starts(step, self.first.shape[1], self.chunk)
        return jax.tree.map(joined, results)

    def to_keys(self, of_rows: Array) -> Array:
        """Sums over queries: [B, Hk, n, span * g, D] to [B, Sk, Hk, D]."""
        edge, padded = self.edge, jnp.zeros_like(self.keys[0], jnp.float32)
        blocks, start = of_rows.shape[2], max(edge.lag - edge.last, 0)
        parts = jnp.split(of_rows, edge.last - edge.start + 1, axis=3)
        for number, part in enumerate(parts):
            first = start + number
            padded = padded.at[:, :, first : first + blocks].add(part)
        return from_blocks(padded[:, :, max(edge.last - edge.lag, 0) :])


def _of_heads(x: Array) -> Array:
    """[B, Hk, G, ...] to [B, Hq, ...]."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])
