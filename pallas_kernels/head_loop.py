"""Attention of some key/value heads at a time, so that work lists and gathered keys are small.

No sum runs over key/value heads, so the order of every sum is the same for any number of parts.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.checks import Shaped
from pallas_kernels.interface import Pair
from pallas_kernels.schedule import Schedule, Triple

_PART_BYTES = 1 << 32  # of gathered keys and work lists, if heads can be divided so far
LISTS = 2  # the key blocks of each query block, and the transpose; int32


def num_head_chunks(heads: int, kv_heads: int, gathered_bytes: int, block_pairs: int) -> int:
    """Returns in how many parts a device computes its heads, by their size.

    `gathered_bytes` are those of keys, values and gradients from other devices. `block_pairs` are
    the pairs of query block and key block of a head in work lists, 0 if there are no such lists.
    """
    size = gathered_bytes + 4 * LISTS * heads * block_pairs
    # The fused backward kernel, which reads no lists, processes query heads in pairs.
    even = [n for n in range(1, kv_heads + 1) if block_pairs or heads // n % 2 == 0]
    allowed = [n for n in even if kv_heads % n == 0]
    return next((n for n in allowed if size <= n * _PART_BYTES), max(allowed, default=1))


@dataclasses.dataclass(frozen=True)
class HeadLoop:
    """Each pass computes equal parts of the heads, one after another.

    Arrays of an index are [B, Hq, ...].
    """

    inner: Schedule
    parts: int

    @property
    def backend(self) -> str | None:
        return self.inner.backend

    def prepare(self, q: Shaped, k: Shaped, index: Any) -> Any:
        return index  # work lists are made for each part, in each pass

    def forward(self, q: Array, k: Array, v: Array, work: Any) -> Pair:
        lse = jnp.zeros((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)

        def attend(i: Array, found: Pair) -> Pair:
            (q_i, k_i, v_i), index = _part(i, self.parts, (q, k, v), work)
            planned = self.inner.prepare(q_i, k_i, index)
            out, lse = self.inner.forward(q_i, k_i, v_i, planned)
            return _put(i, found[0], out, 2), _put(i, found[1], lse, 1)

        return lax.fori_loop(0, self.parts, attend, (jnp.zeros_like(q), lse))

    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, work: Any, lse: Array, delta: Array
    ) -> Triple:
        def differentiate(i: Array, found: Triple) -> Triple:
            wide, narrow = _part(i, self.parts, (q, k, v, dout), (work, lse, delta))
            (q_i, k_i, v_i, dout_i), (index, *rows) = wide, narrow
            planned = self.inner.prepare(q_i, k_i, index)
            grads = self.inner.backward(q_i, k_i, v_i, dout_i, planned, *rows)
            dq, dk, dv = (_put(i, x, part, 2) for x, part in zip(found, grads, strict=True))
            return dq, dk, dv

        zeros = jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
        return lax.fori_loop(0, self.parts, differentiate, zeros)


def _part(i: Array, parts: int, wide: Any, narrow: Any) -> tuple[Any, Any]:
    """Returns part i of the heads of arrays [B, n, H, D] and of arrays [B, H, ...]."""

    def cut(axis: int, x: Array) -> Array:
        size = x.shape[axis] // parts
        return lax.dynamic_slice_in_dim(x, i * size, size, axis)

    return tuple(jax.tree.map(functools.partial(cut, n), x) for n, x in ((2, wide), (1, narrow)))


def _put(i: Array, x: Array, part: Array, axis: int) -> Array:
    return lax.dynamic_update_slice_in_dim(x, part, i * part.shape[axis], axis)
