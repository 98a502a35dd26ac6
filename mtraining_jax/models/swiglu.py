"""The gated MLP, in chunks of tokens.

Its activations for a whole shard are too large: 2.7 GiB per array for 131072 tokens of Qwen2.5-3B.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from mtraining_jax.models.lora.adapters import LoraSpec
from mtraining_jax.models.lora.projection import Dropout, Projection, Projector, widened
from mtraining_jax.models.products import chunked, dot, dot32, first_chunks

# Name of the gate and up products, for a policy that saves them.
MLP_PRODUCTS = "mlp_products"


# Names of the three projections.
_GATE, _UP, _DOWN = "gate_proj", "up_proj", "down_proj"


# By the name in config.json.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


# Of gpt-oss.
_LIMIT, _ALPHA = 7.0, 1.702


def gated(activation: str, gate: Array, up: Array) -> Array:
    """The activations of an MLP: the activation of gate times up, or the clamped SwiGLU."""
    if activation != "clamped_swiglu":
        return ACTIVATIONS[activation](gate) * up
    gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
    return gate * jax.nn.sigmoid(_ALPHA * gate) * (up + 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def chunked_swiglu(
    x_TE: Array,
    gate: Projection,
    up: Projection,
    down: Projection,
    seeds_T: Array | None,
    chunk_size: int,
    kept_chunks: int = 0,
    lora: LoraSpec | None = None,
    activation: str = "silu",
) -> Array:
    """down(silu(gate(x)) * up(x)), for at most `chunk_size` tokens at a time.

    `activation` is as in `gated`.

    The backward pass recomputes the gate and up products, except those of the first `kept_chunks`
    chunks, named `MLP_PRODUCTS`. Gradients of weights accumulate in fp32. With `lora` only adapters
    have gradients, and `seeds_T` are those of their `Dropout`.
    """
    how = chunk_size, kept_chunks, lora, activation
    return _forward(x_TE, gate, up, down, seeds_T, *how)[0]


def _forward(x_TE, gate, up, down, seeds_T, chunk_size, kept_chunks, lora, activation):
    def swiglu(x_CE: Array, seeds_C: Array | None) -> tuple[Array, tuple[Array, Array]]:
        project = _projector(lora, seeds_C)
        lows = project.low(x_CE, gate, _GATE), project.low(x_CE, up, _UP)
        products = _products(x_CE, lows, gate, up)
        hidden_CF = gated(activation, *products)
        return project(hidden_CF, down, _DOWN), products

    out_TE, products = in_chunks(swiglu, (x_TE, seeds_T), chunk_size, kept_chunks)
    return out_TE, (x_TE, gate, up, down, seeds_T, products)


def _backward(chunk_size, kept_chunks, lora, activation, residuals, d_out_TE):
    x_TE, gate, up, down, seeds_T, kept_products = residuals
    dtype = x_TE.dtype

    def chunk(sums, inputs, products=None):
        x_CE, d_out_CE, seeds_C = inputs
        project = _projector(lora, seeds_C)
        lows = project.low(x_CE, gate, _GATE), project.low(x_CE, up, _UP)
        d_low = project.d_low(d_out_CE, down)
        if products is None:
            products = _products(x_CE, lows, gate, up)
        d_hidden_CF = project.transposed(d_out_CE, d_low, down, _DOWN)
        gradients_of = functools.partial(activation_gradients, activation=activation)
        hidden_CF, d_gate_CF, d_up_CF = gradients_of(products, d_hidden_CF)
        hidden_CF = hidden_CF.astype(dtype)
        d_x_gate, d_low_gate = project.split(dot32("cf,fe->ce", d_gate_CF, gate.wide), gate)
        d_x_up, d_low_up = project.split(dot32("cf,fe->ce", d_up_CF, up.wide), up)
        d_x_CE = project.through_A(d_x_gate, d_low_gate, gate, _GATE)
        d_x_CE += project.through_A(d_x_up, d_low_up, up, _UP)
        low_down = project.low(hidden_CF, down, _DOWN)
        gradients = (
            project.gradients(x_CE, lows[0], d_gate_CF, d_low_gate, _GATE),
            project.gradients(x_CE, lows[1], d_up_CF, d_low_up, _UP),
            project.gradients(hidden_CF, low_down, d_out_CE, d_low, _DOWN),
        )
        return jax.tree.map(jnp.add, sums, gradients), d_x_CE.astype(dtype)

    trained = tuple(projection.trained(lora) for projection in (gate, up, down))
    sums = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), trained)
    kept, rest = token_parts((x_TE, d_out_TE, seeds_T), chunk_size, kept_chunks)
    d_x = []
    if kept[0].shape[0]:
        sums, d_kept = chunk(sums, kept, kept_products)
        d_x.append(d_kept)
    if rest[0].shape[0]:
        sums, d_rest = lax.scan(chunk, sums, rest)
        d_x.append(d_rest.reshape(-1, x_TE.shape[1]))
    return (
        jnp.concatenate(d_x)[: x_TE.shape[0]],
        *jax.tree.map(lambda w: w.astype(dtype), sums),
        None,
    )


chunked_swiglu.defvjp(_forward, _backward)


def activation_gradients(
    products: tuple[Array, Array],
    d_hidden: Array,
    weights: Array | None = None,
    activation: str = "silu",
) -> tuple[Array, Array, Array]:
    """Returns `gated` products in fp32, and the gradients of both, in their dtype.

    `d_hidden`, times optional `weights`, is the gradient of what `gated` returns.
    """
    dtype = d_hidden.dtype
    # The barrier makes XLA compute the three arrays in one pass over these, after any kind of
    # product.
    inputs = lax.optimization_barrier((*products, d_hidden))
    gate, up, d_hidden = (x.astype(jnp.float32) for x in inputs)
    d_hidden = d_hidden if weights is None else d_hidden * weights
    if activation == "clamped_swiglu":
        hidden, backward = jax.vjp(functools.partial(gated, activation), gate, up)
        d_gate, d_up = backward(d_hidden)
        return hidden, d_gate.astype(dtype), d_up.astype(dtype)
    active, slope = _with_slope(activation, gate)
    d_up = (d_hidden * active).astype(dtype)
    return active * up, (d_hidden * up * slope).astype(dtype), d_up


def _with_slope(activation: str, x: Array) -> tuple[Array, Array]:
    """The activation and its derivative."""
    if activation != "silu":
        return jax.jvp(ACTIVATIONS[activation], (x,), (jnp.ones_like(x),))
    sigmoid = jax.nn.sigmoid(x)
    silu = x * sigmoid
    return silu, sigmoid + silu * (1 - sigmoid)


def _projector(lora: LoraSpec | None, seeds_C: Array | None) -> Projector:
    return Projector(lora, None if seeds_C is None else Dropout(seeds_C))


def _products(x_CE: Array, lows: tuple[Any, Any], gate: Projection, up: Projection) -> Any:
    inputs = (widened(x_CE, low) for low in lows)
    return tuple(dot("ce,fe->cf", x, of.wide) for x, of in zip(inputs, (gate, up), strict=True))


def in_chunks(
    mlp: Callable[..., tuple[Array, Any]], arrays: Any, chunk_size: int, kept_chunks: int
) -> tuple[Array, Any]:
    """Runs an MLP on chunks of arrays [T, ...]; returns its output, and products of kept chunks.

    `mlp` returns the output [C, E] and the products, which are named `MLP_PRODUCTS`; None without
    kept chunks.
    """
    kept, rest = token_parts(arrays, chunk_size, kept_chunks)
    outs, products = [], None
    if kept[0].shape[0]:
        out, products = mlp(*kept)
        outs.append(out)
        products = checkpoint_name(products, MLP_PRODUCTS)
    if rest[0].shape[0]:
        out = lax.scan(lambda _, inputs: (None, mlp(*inputs)[0]), None, rest)[1]
        outs.append(out.reshape(-1, out.shape[-1]))
    return jnp.concatenate(outs)[: arrays[0].shape[0]], products


def token_parts(arrays: Any, chunk_size: int, kept_chunks: int) -> tuple[Any, Any]:
    """Splits arrays [T, ...] into tokens of the first chunks [K, ...] and chunks [n, C, ...].

    The last chunk may be padded with zeros.
    """
    tokens = arrays[0].shape[0]
    kept = first_chunks(tokens, chunk_size, kept_chunks)
    size = first_chunks(tokens, chunk_size, 1)
    first = jax.tree.map(lambda x: x[:kept], arrays)
    return first, jax.tree.map(lambda x: chunked(x[kept:], size), arrays)
