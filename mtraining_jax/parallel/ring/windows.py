"""Sliding windows over the ranks of a sequence: only keys that a window reaches travel.

In the striped layout a rank's queries are spread over the sequence, so that their windows need the
keys of all ranks. Queries, keys and values move to contiguous shards first, in one all-to-all, and
outputs move back. Then a window reaches the end of the shard before, or of several.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mtraining_jax.parallel.layout import Layout
from pallas_kernels.index import DenseIndex, WindowIndex
from pallas_kernels.interface import Pair
from pallas_kernels.one_device import attention

Axes = tuple[str, ...]


@jax.named_scope("ring_window")
def window_attention(
    q: Array, k: Array, v: Array, index: WindowIndex, layout: Layout, axes: Axes, **how: Any
) -> Pair:
    """Attention within a window over shards in layout order; see `ring_attention`."""
    contiguous = Layout("contiguous", layout.seq_len, layout.num_ranks, layout.block_size)
    there, back = (
        cast(Callable[[Array], Array], functools.partial(_exchange, (*ends, axes)))
        for ends in ((layout, contiguous), (contiguous, layout))
    )
    q, k, v = map(there, (q, k, v))
    local, rank = contiguous.local_blocks, lax.axis_index(axes)
    lag = min(index.last, local * (layout.num_ranks - 1))
    k, v = (_with_earlier(x, lag, local, layout.num_ranks, axes) for x in (k, v))
    near = _of_keys(index, rank * local - lag, lag + local)
    out, lse = cast(Pair, attention(q, k, v, near, return_lse=True, **how))
    return back(out), back(lse.swapaxes(1, 2)).swapaxes(1, 2)


def _of_keys(index: WindowIndex, start: Array, count: int) -> WindowIndex:
    """Returns the index of `count` blocks from `start` on, which may precede the sequence."""
    blocks = start + jnp.arange(count, dtype=jnp.int32)
    first, end = (x[..., jnp.maximum(blocks, 0)] for x in (index.first, index.end))
    inside = (blocks >= 0) & (first < end)
    first = jnp.where(inside, jnp.maximum(first - start, 0), count)
    end = jnp.where(inside, jnp.minimum(end - start, count), 0)
    return WindowIndex(DenseIndex(index.block_size, first=first, end=end), index.window)


def _with_earlier(x: Array, blocks: int, local: int, ranks: int, axes: Axes) -> Array:
    """Prepends the last blocks of earlier ranks to a contiguous shard, zeros before the first."""
    size, parts = x.shape[1] // local, [x]
    for distance in range(1, -(-blocks // local) + 1):
        count = min(local, blocks - (distance - 1) * local)
        pairs = [(rank, rank + distance) for rank in range(ranks - distance)]
        parts.insert(0, lax.ppermute(x[:, -count * size :], axes, pairs))
    return jnp.concatenate(parts, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(how: tuple[Layout, Layout, Axes], x: Array) -> Array:
    """Moves the blocks of shards [B, n, ...] from one layout to another."""
    before, after, axes = how
    if before.kind == after.kind:
        return x
    to_send, to_keep = _places(before, after)
    rank = lax.axis_index(axes)
    blocks = x.reshape(x.shape[0], before.local_blocks, -1, *x.shape[2:])
    sent = jnp.take(blocks, to_send[rank], axis=1, mode="clip")
    found = lax.all_to_all(sent, axes, split_axis=1, concat_axis=1, tiled=True)
    return jnp.take(found, to_keep[rank], axis=1, mode="clip").reshape(x.shape)


# The transpose of a permutation is its inverse.
_exchange.defvjp(
    lambda how, x: (_exchange(how, x), None),
    lambda how, _, d_x: (_exchange((how[1], how[0], how[2]), d_x),),
)


def _places(before: Layout, after: Layout) -> tuple[Array, Array]:
    """Returns the blocks that each rank sends, and the places where its new blocks arrive.

    int32 [ranks, ranks * m] and [ranks, n]. A rank sends m blocks to every rank, with padding.
    """
    ranks, local = before.num_ranks, before.local_blocks
    order = before.block_order()
    owner = np.argsort(after.block_order()) // local  # of each block
    held = owner[order].reshape(ranks, local)
    sends = [[np.flatnonzero(x == to) for to in range(ranks)] for x in held]
    most = max(len(blocks) for of_rank in sends for blocks in of_rank)
    to_send = np.zeros((ranks, ranks, most), np.int32)
    arrives = np.zeros(before.num_blocks, np.int32)
    for rank, to in np.ndindex(ranks, ranks):
        blocks = sends[rank][to]
        to_send[rank, to, : len(blocks)] = blocks
        arrives[order[rank * local + blocks]] = rank * most + np.arange(len(blocks))
    to_keep = arrives[after.block_order()].reshape(ranks, local)
    return jnp.asarray(to_send.reshape(ranks, -1)), jnp.asarray(to_keep)
