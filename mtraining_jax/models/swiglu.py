"""The gated MLP, in chunks of tokens.

Its activations for a whole shard are too large: 2.7 GiB per array for 131072 tokens of Qwen2.5-3B.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from mtraining_jax.models.chunks import first_chunks, num_chunks
from mtraining_jax.models.products import dot, dot32

# Name of the gate and up products, for a policy that saves them.
MLP_PRODUCTS = "mlp_products"


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def chunked_swiglu(
    x_TE: Array, gate_FE: Array, up_FE: Array, down_EF: Array, chunk_size: int, kept_chunks: int = 0
) -> Array:
    """down(silu(gate(x)) * up(x)), for at most `chunk_size` tokens at a time.

    The backward pass recomputes the gate and up products, except those of the first `kept_chunks`
    chunks, named `MLP_PRODUCTS`. Gradients of weights accumulate in fp32.
    """
    return _forward(x_TE, gate_FE, up_FE, down_EF, chunk_size, kept_chunks)[0]


def _forward(x_TE, gate_FE, up_FE, down_EF, chunk_size, kept_chunks):
    def swiglu(x_CE: Array) -> tuple[Array, tuple[Array, Array]]:
        products = dot("ce,fe->cf", x_CE, gate_FE), dot("ce,fe->cf", x_CE, up_FE)
        hidden_CF = jax.nn.silu(products[0]) * products[1]
        return dot("cf,ef->ce", hidden_CF, down_EF), products

    kept_x, rest_x = _parts(x_TE, chunk_size, kept_chunks)
    outs, products = [], None
    if kept_x.shape[0]:
        out, products = swiglu(kept_x)
        outs.append(out)
        products = checkpoint_name(products, MLP_PRODUCTS)
    if rest_x.shape[0]:
        rest = lax.scan(lambda _, x_CE: (None, swiglu(x_CE)[0]), None, rest_x)[1]
        outs.append(rest.reshape(-1, x_TE.shape[1]))
    return jnp.concatenate(outs), (x_TE, gate_FE, up_FE, down_EF, products)


def _backward(chunk_size, kept_chunks, residuals, d_out_TE):
    x_TE, gate_FE, up_FE, down_EF, kept_products = residuals
    dtype = x_TE.dtype

    def chunk(sums, inputs, products=None):
        d_gate_FE, d_up_FE, d_down_EF = sums
        x_CE, d_out_CE = inputs
        if products is None:
            products = dot("ce,fe->cf", x_CE, gate_FE), dot("ce,fe->cf", x_CE, up_FE)
        products = *products, dot("ce,ef->cf", d_out_CE, down_EF)
        # The barrier makes XLA compute the next three arrays in one pass over these, after any
        # kind of product.
        products = lax.optimization_barrier(products)
        gate_CF, up_CF, d_hidden_CF = (x.astype(jnp.float32) for x in products)
        sigmoid_CF = jax.nn.sigmoid(gate_CF)
        silu_CF = gate_CF * sigmoid_CF
        hidden_CF = (silu_CF * up_CF).astype(dtype)
        d_up_CF = (d_hidden_CF * silu_CF).astype(dtype)
        slope_CF = sigmoid_CF + silu_CF * (1 - sigmoid_CF)
        d_gate_CF = (d_hidden_CF * up_CF * slope_CF).astype(dtype)
        d_x_CE = dot32("cf,fe->ce", d_gate_CF, gate_FE) + dot32("cf,fe->ce", d_up_CF, up_FE)
        sums = (
            d_gate_FE + dot32("cf,ce->fe", d_gate_CF, x_CE),
            d_up_FE + dot32("cf,ce->fe", d_up_CF, x_CE),
            d_down_EF + dot32("ce,cf->ef", d_out_CE, hidden_CF),
        )
        return sums, d_x_CE.astype(dtype)

    sums = tuple(jnp.zeros(w.shape, jnp.float32) for w in (gate_FE, up_FE, down_EF))
    (kept_x, rest_x), (kept_d_out, rest_d_out) = (
        _parts(x, chunk_size, kept_chunks) for x in (x_TE, d_out_TE)
    )
    d_x = []
    if kept_x.shape[0]:
        sums, d_kept = chunk(sums, (kept_x, kept_d_out), kept_products)
        d_x.append(d_kept)
    if rest_x.shape[0]:
        sums, d_rest = lax.scan(chunk, sums, (rest_x, rest_d_out))
        d_x.append(d_rest.reshape(-1, x_TE.shape[1]))
    return jnp.concatenate(d_x), *(w.astype(dtype) for w in sums)


chunked_swiglu.defvjp(_forward, _backward)


def _parts(x_TE: Array, chunk_size: int, kept_chunks: int) -> tuple[Array, Array]:
    """Splits [T, E] into the tokens of the first chunks [K, E] and the other chunks [n, C, E]."""
    tokens, width = x_TE.shape
    kept = first_chunks(tokens, chunk_size, kept_chunks)
    size = tokens // num_chunks(tokens, chunk_size)
    return x_TE[:kept], x_TE[kept:].reshape(-1, size, width)
