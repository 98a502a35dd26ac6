"""Errors against fp32: mtraining-jax on every mask, and cuDNN on the dense one."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.kernels.cases import OWN
from benchmarks.kernels.masks import BLOCK, slash_mask
from benchmarks.kernels.programs import Attention, cudnn_attention, random_inputs
from pallas_kernels import DenseIndex
from pallas_kernels.reference import mask_from_index, reference_attention

NAMES = ("out", "dq", "dk", "dv")


def relative_errors(
    kernels: Attention,
    seed: int,
    seq_len: int,
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    masks: tuple[str, ...],
    cudnn: bool,
) -> dict[tuple[str, str], dict[str, float]]:
    """Norm of the error over the norm of the reference, of out, dq, dk and dv.

    Returns:
        A dict from (mask, kernels).
    """
    rng = np.random.default_rng(seed)
    q, k, v, dout = random_inputs(jax.random.key(seed), seq_len, heads, kv_heads, dim)
    compare = jax.jit(_relative)
    result = {}
    for name in masks:
        if name == "D":
            index = DenseIndex(BLOCK)
        else:
            index = slash_mask(name, rng, heads, seq_len).index(seq_len // BLOCK, 4096)
        expected = _reference(q, k, v, dout, index)
        actual = jax.jit(
            _with_gradients(lambda q, k, v, index=index: kernels.attention(q, k, v, index))
        )(q, k, v, dout)
        result[name, OWN] = compare(actual, expected)
        if name == "D" and cudnn:
            actual = jax.jit(_with_gradients(cudnn_attention))(q, k, v, dout)
            result[name, "cuDNN"] = compare(actual, expected)
    return {
        key: dict(zip(NAMES, map(float, values), strict=True)) for key, values in result.items()
    }


def _with_gradients(attention: Callable[..., Array]) -> Callable[..., tuple[Array, ...]]:
    def call(q, k, v, dout):
        out, vjp = jax.vjp(attention, q, k, v)
        return out, *vjp(dout)

    return call


@jax.jit
def _reference(q, k, v, dout, index) -> list[Array]:
    """The oracle in fp32, one key/value head at a time to bound its memory."""
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    parts = []
    for head in range(kv_heads):
        queries = slice(head * group, (head + 1) * group)
        index_of_head = jax.tree.map(lambda x, queries=queries: x[:, queries], index)
        mask = mask_from_index(index_of_head, q.shape[1])
        part = _with_gradients(lambda q, k, v, mask=mask: reference_attention(q, k, v, mask)[0])
        inputs = (q[:, :, queries], k[:, :, head, None], v[:, :, head, None], dout[:, :, queries])
        parts.append(part(*(x.astype(jnp.float32) for x in inputs)))
    return [jnp.concatenate(x, axis=2) for x in zip(*parts, strict=True)]


def _relative(actual, expected) -> list[Array]:
    return [
        jnp.linalg.norm((a.astype(jnp.float32) - e).ravel()) / jnp.linalg.norm(e.ravel())
        for a, e in zip(actual, expected, strict=True)
    ]
