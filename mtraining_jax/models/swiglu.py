"""The gated MLP, some tokens at a time.

For a whole shard of a long sequence, what lies between the two products is several times larger
than the residual stream: 2.7 GiB an array for 131072 tokens of Qwen2.5-3B.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.models.token_parallel import num_chunks


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def chunked_swiglu(
    x_TE: Array, gate_FE: Array, up_FE: Array, down_EF: Array, chunk_size: int
) -> Array:
    """down(silu(gate(x)) * up(x)), for at most `chunk_size` tokens at a time.

    The backward pass keeps x alone: it computes the products with gate and up again. Gradients
    of weights add up over chunks in fp32.

    Args:
        x_TE: [T, E].
        gate_FE, up_FE: [F, E] in the dtype of x.
        down_EF: [E, F] in the dtype of x.
        chunk_size: tokens whose [F] activations exist at a time.

    Returns:
        [T, E] in the dtype of x.
    """

    def chunk(_: None, x_CE: Array) -> tuple[None, Array]:
        hidden_CF = jax.nn.silu(_dot("ce,fe->cf", x_CE, gate_FE)) * _dot("ce,fe->cf", x_CE, up_FE)
        return None, _dot("cf,ef->ce", hidden_CF, down_EF)

    return lax.scan(chunk, None, _cut(x_TE, chunk_size))[1].reshape(x_TE.shape)


def _forward(x_TE, gate_FE, up_FE, down_EF, chunk_size):
    out_TE = chunked_swiglu(x_TE, gate_FE, up_FE, down_EF, chunk_size)
    return out_TE, (x_TE, gate_FE, up_FE, down_EF)


def _backward(chunk_size, residuals, d_out_TE):
    x_TE, gate_FE, up_FE, down_EF = residuals
    dtype = x_TE.dtype

    def chunk(sums, inputs):
        d_gate_FE, d_up_FE, d_down_EF = sums
        x_CE, d_out_CE = inputs
        products = (
            _dot("ce,fe->cf", x_CE, gate_FE),
            _dot("ce,fe->cf", x_CE, up_FE),
            _dot("ce,ef->cf", d_out_CE, down_EF),
        )
        # The barrier has XLA make the next three arrays in one pass over these, behind any kind
        # of product.
        products = lax.optimization_barrier(products)
        gate_CF, up_CF, d_hidden_CF = (x.astype(jnp.float32) for x in products)
        sigmoid_CF = jax.nn.sigmoid(gate_CF)
        silu_CF = gate_CF * sigmoid_CF
        hidden_CF = (silu_CF * up_CF).astype(dtype)
        d_up_CF = (d_hidden_CF * silu_CF).astype(dtype)
        slope_CF = sigmoid_CF + silu_CF * (1 - sigmoid_CF)
        d_gate_CF = (d_hidden_CF * up_CF * slope_CF).astype(dtype)
        d_x_CE = _dot32("cf,fe->ce", d_gate_CF, gate_FE) + _dot32("cf,fe->ce", d_up_CF, up_FE)
        sums = (
            d_gate_FE + _dot32("cf,ce->fe", d_gate_CF, x_CE),
            d_up_FE + _dot32("cf,ce->fe", d_up_CF, x_CE),
            d_down_EF + _dot32("ce,cf->ef", d_out_CE, hidden_CF),
        )
        return sums, d_x_CE.astype(dtype)

    zeros = tuple(jnp.zeros(w.shape, jnp.float32) for w in (gate_FE, up_FE, down_EF))
    sums, d_x = lax.scan(chunk, zeros, (_cut(x_TE, chunk_size), _cut(d_out_TE, chunk_size)))
    return d_x.reshape(x_TE.shape), *(w.astype(dtype) for w in sums)


chunked_swiglu.defvjp(_forward, _backward)


def _cut(x_TE: Array, chunk_size: int) -> Array:
    """[T, E] -> [chunks, C, E]."""
    tokens, width = x_TE.shape
    count = num_chunks(tokens, chunk_size)
    return x_TE.reshape(count, tokens // count, width)


def _dot(equation: str, a: Array, b: Array) -> Array:
    """A product in the dtype of a. Hardware adds up in fp32 either way.

    Asked for fp32 and a cast, XLA writes fp32 to memory: twice the bytes.
    """
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(equation, a, b, precision=exact)


def _dot32(equation: str, a: Array, b: Array) -> Array:
    """A product in fp32."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(equation, a, b, precision=exact, preferred_element_type=jnp.float32)
