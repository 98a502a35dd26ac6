"""Errors against fp32: mtraining-jax on every mask, and cuDNN on the dense one."""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.kernels.masks import BLOCK, slash_mask
from benchmarks.kernels.programs import Attention, cudnn_attention, index_of, random_inputs
from benchmarks.kernels.rows import OWN, Shape
from pallas_kernels import DenseIndex
from pallas_kernels.reference import reference_attention

Errors = dict[tuple[str, str], dict[str, float]]


def relative_errors(
    kernels: Attention, seed: int, shape: Shape, masks: Iterable[str], cudnn: bool
) -> Errors:
    """Norm of the error over that of the reference, of out, dq, dk and dv, by mask and kernels."""
    rng = np.random.default_rng(seed)
    inputs = random_inputs(jax.random.key(seed), shape)
    compare, result = jax.jit(_relative), {}
    for name in masks:
        index = DenseIndex(BLOCK)
        if name != "D":
            mask = slash_mask(name, rng, shape.heads, shape.seq_len)
            index = index_of(mask, shape.seq_len // BLOCK, 4096)
        expected = _reference(*inputs, index)
        attentions = {OWN: lambda q, k, v, index=index: kernels.attention(q, k, v, index)}
        if name == "D" and cudnn:
            attentions["cuDNN"] = cudnn_attention
        for who, attention in attentions.items():
            errors = compare(jax.jit(_with_gradients(attention))(*inputs), expected)
            values = zip(("out", "dq", "dk", "dv"), map(float, errors), strict=True)
            result[name, who] = dict(values)
    return result


def _with_gradients(attention: Callable[..., Array]) -> Callable[..., tuple[Array, ...]]:
    def call(q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, ...]:
        out, vjp = jax.vjp(attention, q, k, v)
        return out, *vjp(dout)

    return call


@jax.jit
def _reference(q: Array, k: Array, v: Array, dout: Array, index) -> list[Array]:
    """The oracle in fp32, one key/value head at a time to bound its memory."""
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    parts = []
    for head in range(kv_heads):
        queries = slice(head * group, (head + 1) * group)
        index_of_head = jax.tree.map(lambda x, queries=queries: x[:, queries], index)
        mask = index_of_head.to_mask(q.shape[1])
        part = _with_gradients(lambda q, k, v, mask=mask: reference_attention(q, k, v, mask)[0])
        inputs = (q[:, :, queries], k[:, :, head, None], v[:, :, head, None], dout[:, :, queries])
        parts.append(part(*(x.astype(jnp.float32) for x in inputs)))
    return [jnp.concatenate(x, axis=2) for x in zip(*parts, strict=True)]


def _relative(actual: Iterable[Array], expected: Iterable[Array]) -> list[Array]:
    return [
        jnp.linalg.norm((a.astype(jnp.float32) - e).ravel()) / jnp.linalg.norm(e.ravel())
        for a, e in zip(actual, expected, strict=True)
    ]
