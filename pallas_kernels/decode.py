"""Attention of one new token per sequence to listed key blocks of a cache."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels import backends
from pallas_kernels.checks import BLOCK_SIZE
from pallas_kernels.interface import Pair


class DecodeCall(NamedTuple):
    """Queries of new tokens, and what they attend to; rotated and unscaled."""

    q: Array  # [B, Hq, D]
    k: Array  # [B, Hk, S, D], S a multiple of 128, Hq of Hk
    v: Array  # as k
    blocks: Array  # int32 [B or 1, Hk or 1, N], blocks of 128 keys, each listed at most once
    counts: Array  # int32 [B or 1, Hk or 1], how many entries of `blocks` count
    seen: Array  # int32 [S / 128, 2], the first key of each block that tokens see, and the end
    scale: float  # of the logits


def decode(call: DecodeCall, backend: str | None = None) -> Pair:
    """Computes attention to the seen keys of the listed blocks, the same ones for a group of heads.

    Bits depend on the shapes and on the call's values only. XLA reads the whole cache.

    Returns:
        out fp32 [B, Hq, D] and lse fp32 [B, Hq]; 0 and -inf if a token sees no key.

    Raises:
        ValueError: if the backend has no kernel for the call.
    """
    kernel = backends.decode_kernel(backend, call.q)
    return _dense(call) if kernel is None else kernel(call)


def _dense(call: DecodeCall) -> Pair:
    """Masks what is not listed."""
    q, k, v, blocks, counts, seen, scale = call
    batch, heads, dim = q.shape
    kv_heads, tokens = k.shape[1:3]
    numbers = jnp.where(jnp.arange(blocks.shape[-1]) < counts[..., None], blocks, len(seen))
    listed = (numbers[..., None] == jnp.arange(len(seen))).any(-2)  # [B, Hk, NB]
    within = jnp.arange(BLOCK_SIZE)
    inside = (within >= seen[:, :1]) & (within < seen[:, 1:])
    mask = (listed[..., None] & inside).reshape(*listed.shape[:2], 1, tokens)
    logits = _product("bhgd,bhsd->bhgs", q.reshape(batch, kv_heads, -1, dim), k) * scale
    logits = jnp.where(mask, logits, -jnp.inf)
    peak = logits.max(-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(peak == -jnp.inf, 0.0, peak))
    total = weights.sum(-1, keepdims=True)
    out = _product("bhgs,bhsd->bhgd", weights.astype(v.dtype), v) / jnp.where(total > 0, total, 1.0)
    lse = (peak + jnp.log(total))[..., 0]
    return out.reshape(q.shape), lse.reshape(batch, heads)


def _product(equation: str, *operands: Array) -> Array:
    return jnp.einsum(equation, *operands, preferred_element_type=jnp.float32)


def combine(out: Array, lse: Array, axis: int) -> Pair:
    """Combines attention to disjoint sets of keys: out [..., D] and lse [...], along an axis."""
    peak = lse.max(axis, keepdims=True)
    share = jnp.exp(lse - jnp.where(peak == -jnp.inf, 0.0, peak))
    total = share.sum(axis)
    out = (out * share[..., None]).sum(axis) / jnp.where(total > 0, total, 1.0)[..., None]
    return out, jnp.squeeze(peak, axis) + jnp.log(total)
