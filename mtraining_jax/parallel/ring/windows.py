"""Sliding windows over the ranks of a sequence: only keys that a window reaches travel.

In the striped layout a rank's queries are spread over the sequence, so that their windows need the
keys of all ranks. Queries, keys and values move to contiguous shards first, in one all-to-all, and
outputs move back. Then a window reaches the end of the shard before, or of several.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mtraining_jax.parallel.layout import Layout
from pallas_kernels.checks import Shaped
from pallas_kernels.index import DenseIndex, WindowIndex
from pallas_kernels.interface import Pair
from pallas_kernels.one_device import OneDevice
from pallas_kernels.schedule import Triple

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class RingWindow:
    """Attention within a window over shards in layout order.

    `last` is the number of blocks before its own that a block of queries can reach.
    """

    layout: Layout
    axes: Axes
    last: int
    inner: OneDevice

    @property
    def backend(self) -> str | None:
        return self.inner.backend

    def prepare(self, q: Shaped, k: Shaped, index: WindowIndex) -> Any:
        local, lag = self.layout.local_blocks, self._lag
        near = _key_index(index, lax.axis_index(self.axes) * local - lag, lag + local)
        tokens = (lag + local) * index.block_size
        keys = jax.ShapeDtypeStruct((k.shape[0], tokens, *k.shape[2:]), k.dtype)
        return self.inner.prepare(q, keys, near)

    @jax.named_scope("ring_window")
    def forward(self, q: Array, k: Array, v: Array, work: Any) -> Pair:
        q, k, v = map(self._there, (q, k, v))
        out, lse = self.inner.forward(q, self._extended(k), self._extended(v), work)
        return self._back(out), self._rows(self._back, lse)

    @jax.named_scope("ring_window")
    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, work: Any, lse: Array, delta: Array
    ) -> Triple:
        q, k, v, dout = map(self._there, (q, k, v, dout))
        lse, delta = (self._rows(self._there, x) for x in (lse, delta))
        keys = self._extended(k), self._extended(v)
        dq, *grads = self.inner.backward(q, *keys, dout, work, lse, delta)
        reduced = (jax.linear_transpose(self._extended, k)(x)[0] for x in grads)
        dk, dv = map(self._back, reduced)
        return self._back(dq), dk, dv

    @property
    def _lag(self) -> int:
        return min(self.last, self.layout.local_blocks * (self.layout.num_ranks - 1))

    @property
    def _contiguous(self) -> Layout:
        layout = self.layout
        return Layout("contiguous", layout.seq_len, layout.num_ranks, layout.block_size)

    def _there(self, x: Array) -> Array:
        return _exchange(self.layout, self._contiguous, self.axes, x)

    def _back(self, x: Array) -> Array:
        return _exchange(self._contiguous, self.layout, self.axes, x)

    def _rows(self, move: Callable[[Array], Array], x_BHn: Array) -> Array:
        return move(x_BHn.swapaxes(1, 2)).swapaxes(1, 2)

    def _extended(self, x: Array) -> Array:
        layout = self.layout
        return _with_earlier(x, self._lag, layout.local_blocks, layout.num_ranks, self.axes)


def _key_index(index: WindowIndex, start: Array, count: int) -> WindowIndex:
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


def _exchange(before: Layout, after: Layout, axes: Axes, x: Array) -> Array:
    """Moves the blocks of shards [B, n, ...] from one layout to another."""
    if before.kind == after.kind:
        return x
    to_send, to_keep = _places(before, after)
    rank = lax.axis_index(axes)
    blocks = x.reshape(x.shape[0], before.local_blocks, -1, *x.shape[2:])
    sent = jnp.take(blocks, to_send[rank], axis=1, mode="clip")
    found = lax.all_to_all(sent, axes, split_axis=1, concat_axis=1, tiled=True)
    return jnp.take(found, to_keep[rank], axis=1, mode="clip").reshape(x.shape)


def _places(before: Layout, after: Layout) -> tuple[Array, Array]:
    """Returns the blocks that each rank sends, and the places where its new blocks arrive.

    int32 [ranks, ranks * m] and [ranks, n]. A rank sends m blocks to every rank, with padding.
    """
    ranks, local = before.num_ranks, before.local_blocks
    order = before.block_order()
    owner = np.argsort(after.block_order()) // local  # of each block
    held = owner[order].reshape(ranks, local)
    sends = [[np.flatnonzero(x == to) for to in range(ranks)] for x in held]
    most = max(len(blocks) for rank_sends in sends for blocks in rank_sends)
    to_send = np.zeros((ranks, ranks, most), np.int32)
    arrives = np.zeros(before.num_blocks, np.int32)
    for rank, to in np.ndindex(ranks, ranks):
        blocks = sends[rank][to]
        to_send[rank, to, : len(blocks)] = blocks
        arrives[order[rank * local + blocks]] = rank * most + np.arange(len(blocks))
    to_keep = arrives[after.block_order()].reshape(ranks, local)
    return jnp.asarray(to_send.reshape(ranks, -1)), jnp.asarray(to_keep)
