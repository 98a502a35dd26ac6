"""Small inputs for the tests of `sparse_attention`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mtraining_jax import VerticalSlash, sparse_attention
from tests.patterns import inputs as realistic

TOKENS, BLOCK, HEADS, KV_HEADS, DIM = 128, 8, 6, 3, 8
PATTERN = VerticalSlash(
    top_p=0.4, max_verticals=24, max_slashes=12, num_probe_queries=8, block_size=BLOCK,
    sink_tokens=2, local_blocks=1, min_verticals=4, min_slashes=2,
)  # fmt: skip


@functools.cache
def inputs():
    """q [2, S, 6, 8], k and v [2, S, 3, 8], fp32."""
    with jax.ensure_compile_time_eval():  # the first call may be inside a trace
        q, k = realistic.random(0, 2, TOKENS, HEADS, KV_HEADS, DIM)
        v = np.random.default_rng(1).normal(size=k.shape)
        return q, k, jnp.asarray(v, jnp.float32)


def with_lse(*qkv, **options):
    """Returns out and lse of `sparse_attention`."""
    out, residuals = sparse_attention(*qkv, return_residuals=True, **options)
    return out, residuals.lse


def with_residuals(*qkv, **options):
    """Returns out, lse and index of `sparse_attention`."""
    out, residuals = sparse_attention(*qkv, return_residuals=True, **options)
    return out, *residuals
