import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.models.lora.projection import Projection
from mtraining_jax.models.swiglu import chunked_swiglu

TOKENS, WIDTH, INNER = 24, 8, 12


def example(dtype):
    rng = np.random.default_rng(0)
    shapes = (TOKENS, WIDTH), (INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def swiglu(x, gate, up, down, *how):
    return chunked_swiglu(x, *map(Projection, (gate, up, down)), None, *how)


def whole(x, gate, up, down):
    exact = jax.lax.Precision.HIGHEST
    hidden = jax.nn.silu(jnp.dot(x, gate.T, precision=exact)) * jnp.dot(x, up.T, precision=exact)
    return jnp.dot(hidden, down.T, precision=exact)


def with_gradients(function, arguments):
    def total(*arguments):
        out = function(*arguments)
        return jnp.sum(out.astype(jnp.float32) * jnp.cos(jnp.arange(out.size)).reshape(out.shape))

    both = jax.jit(lambda *x: (function(*x), jax.grad(total, (0, 1, 2, 3))(*x)))
    return both(*arguments)


@pytest.mark.parametrize(
    ("chunk_size", "kept_chunks", "tokens"),
    [
        *(
            (*how, 24)
            for how in ((1, 0), (5, 0), (24, 0), (1000, 0), (8, 1), (5, 2), (8, 3), (8, 9))
        ),
        *((*how, 23) for how in ((5, 0), (5, 2), (5, 5), (12, 1))),  # with padding
    ],
)
def test_chunks_change_neither_result_nor_gradients(chunk_size, kept_chunks, tokens):
    x, *weights = example(jnp.float32)
    arguments = x[:tokens], *weights
    expected = with_gradients(whole, arguments)
    actual = with_gradients(lambda *x: swiglu(*x, chunk_size, kept_chunks), arguments)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def tanh_gelu(x):
    return x * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2


@pytest.mark.parametrize(
    ("activation", "hidden_of"),
    [
        ("gelu_pytorch_tanh", lambda gate, up: tanh_gelu(gate) * up),
        (
            "clamped_swiglu",
            lambda gate, up: (
                jnp.minimum(gate, 7)
                * jax.nn.sigmoid(1.702 * jnp.minimum(gate, 7))
                * (jnp.clip(up, -7, 7) + 1)
            ),
        ),
    ],
)
def test_other_activations_have_the_gradients_of_their_definition(activation, hidden_of):
    def by_definition(x, gate, up, down):
        gate, up = (jnp.dot(x, w.T, precision=jax.lax.Precision.HIGHEST) for w in (gate, up))
        return jnp.dot(hidden_of(gate, up), down.T, precision=jax.lax.Precision.HIGHEST)

    arguments = example(jnp.float32)
    expected = with_gradients(by_definition, arguments)
    actual = with_gradients(lambda *x: swiglu(*x, 5, 1, None, activation), arguments)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def test_bf16_weight_gradients_accumulate_in_fp32_over_chunks():
    arguments = example(jnp.bfloat16)
    exact = with_gradients(whole, [x.astype(jnp.float32) for x in arguments])
    actual = with_gradients(lambda *x: swiglu(*x, 1), arguments)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(exact), strict=True):
        assert ours.dtype == jnp.bfloat16
        error = jnp.linalg.norm(ours.astype(jnp.float32) - theirs) / jnp.linalg.norm(theirs)
        assert error < 1e-2  # bf16 keeps 8 bits; 24 rounded sums would lose more


def test_no_activation_of_all_tokens_is_formed():
    def total(*arguments):
        return swiglu(*arguments, 8).sum()

    jaxpr = str(jax.make_jaxpr(jax.grad(total, (0, 1, 2, 3)))(*example(jnp.float32)))
    assert f"f32[8,{INNER}]" in jaxpr
    assert f"[{TOKENS},{INNER}]" not in jaxpr and f"[3,8,{INNER}]" not in jaxpr
