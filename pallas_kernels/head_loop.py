"""Attention of some key/value heads at a time, so that work lists and gathered keys are small.

No sum runs over key/value heads, so the order of every sum is the same for any number of parts.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import names
from pallas_kernels.interface import Pair
from pallas_kernels.ops import delta_of

_PART_BYTES = 1 << 32  # of gathered keys and work lists, if heads can be divided so far
LISTS = 2  # the key blocks of each query block, and the transpose; int32

Forward = Callable[[Array, Array, Array, Any], Pair]  # of q, k, v and index: out and lse
# Of q, k, v, gradient of the output, index, lse and delta: dq, dk and dv.
Backward = Callable[..., tuple[Array, Array, Array]]


def head_parts(heads: int, kv_heads: int, gathered_bytes: int, block_pairs: int) -> int:
    """Returns in how many parts a device computes its heads, by their size.

    `gathered_bytes` are those of keys, values and gradients from other devices. `block_pairs` are
    the pairs of query block and key block of a head in work lists, 0 if there are no such lists.
    """
    size = gathered_bytes + 4 * LISTS * heads * block_pairs
    # The fused backward kernel, which reads no lists, processes query heads in pairs.
    even = [n for n in range(1, kv_heads + 1) if block_pairs or heads // n % 2 == 0]
    allowed = [n for n in even if kv_heads % n == 0]
    return next((n for n in allowed if size <= n * _PART_BYTES), max(allowed, default=1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def attention_in_parts(
    parts: int,
    backend: str | None,
    forward: Forward,
    backward: Backward,
    q: Array,
    k: Array,
    v: Array,
    index: Any,
) -> Pair:
    """Computes out and lse of q [B, n, Hq, D]; each pass calls its function once per part.

    Arrays of `index` are [B, Hq, ...]; it is not differentiated.
    """
    return _forward(parts, backend, forward, backward, q, k, v, index)[0]


def _forward(parts, backend, forward, backward, q, k, v, index):
    del backend, backward
    lse = jnp.zeros((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)

    def attend(i, found):
        qkv, of_heads = _part(i, parts, (q, k, v), index)
        out, lse = forward(*qkv, of_heads)
        return _put(i, found[0], out, 2), _put(i, found[1], lse, 1)

    out, lse = lax.fori_loop(0, parts, attend, (jnp.zeros_like(q), lse))
    out, lse = checkpoint_name(out, names.OUTPUT), checkpoint_name(lse, names.LSE)
    return (out, lse), (q, k, v, index, out, lse)


def _backward(parts, backend, forward, backward, residuals, cotangents):
    del forward
    (*qkv, index, out, lse), (dout, dlse) = residuals, cotangents
    # d lse / d logits are the softmax weights, so the cotangent of lse is folded into delta.
    delta = delta_of(out, dout, backend=backend) - dlse

    def differentiate(i, found):
        wide, narrow = _part(i, parts, (*qkv, dout), (index, lse, delta))
        grads = backward(*wide, *narrow)
        return [_put(i, x, part, 2) for x, part in zip(found, grads, strict=True)]

    zeros = [jnp.zeros_like(x) for x in qkv]
    return *lax.fori_loop(0, parts, differentiate, zeros), None


attention_in_parts.defvjp(_forward, _backward)


def _part(i: Array, parts: int, wide: Any, narrow: Any) -> tuple[Any, Any]:
    """Returns part i of the heads of arrays [B, n, H, D] and of arrays [B, H, ...]."""

    def cut(axis: int, x: Array) -> Array:
        size = x.shape[axis] // parts
        return lax.dynamic_slice_in_dim(x, i * size, size, axis)

    return tuple(jax.tree.map(functools.partial(cut, n), x) for n, x in ((2, wide), (1, narrow)))


def _put(i: Array, x: Array, part: Array, axis: int) -> Array:
    return lax.dynamic_update_slice_in_dim(x, part, i * part.shape[axis], axis)
