"""A mixture of experts, compared with all experts computed for all tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mtraining_jax.models.experts.mixture import (
    Balance,
    balance,
    balance_loss,
    chunked_experts,
    padded_experts,
    route,
)
from mtraining_jax.models.lora.adapters import LoraSpec
from mtraining_jax.models.swiglu import MLP_PRODUCTS
from mtraining_jax.models.transformer import Experts
from pallas_kernels import backends
from tests.models.common import assert_states_close, equations, tiny_spec

TOKENS, WIDTH, INNER, EXPERTS, SELECTED = 24, 8, 12, 5, 2
MOE = {"family": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2}
# By transformers 5.24: of 24, 24 and 17 tokens.
BALANCE_LOSSES = 2.0260370, 2.1876018, 2.1266141
REMAT = {"remat": "mlp", "mlp_kept_chunks": 1}


def example(dtype=jnp.float32):
    """Tokens, a router and experts; nothing selects the last expert."""
    rng = np.random.default_rng(0)
    shapes = (TOKENS, WIDTH), (EXPERTS, WIDTH), *[(EXPERTS, INNER, WIDTH)] * 2
    x, router, *rest = (rng.normal(size=shape) for shape in (*shapes, (EXPERTS, WIDTH, INNER)))
    x[:, 0], router[-1] = 10, -10 * np.eye(WIDTH)[0]
    return [jnp.asarray(value, dtype) for value in (x, router, *rest)]


def experts(x, router, gate, up, down, *how, normalize=True):
    routed = route(x, router, SELECTED, normalize)
    return chunked_experts(x, routed.ids, routed.weights, gate, up, down, *how)


def biases(dtype=jnp.float32):
    """Those of the router, gate, up and down."""
    rng = np.random.default_rng(1)
    shapes = (EXPERTS,), *[(EXPERTS, INNER)] * 2, (EXPERTS, WIDTH)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def gpt_oss(x, router, gate, up, down, of_router, *others, how=(8, 1)):
    routed = route(x, router, SELECTED, True, of_router)
    pairs, how = (routed.ids, routed.weights), (*how, True, "clamped_swiglu")
    return padded_experts(x, pairs, (gate, up, down), others, *how)


def all_of_gpt_oss(x, router, gate, up, down, of_router, of_gate, of_up, of_down):
    """With the weights as softmax over the selected experts."""
    with jax.default_matmul_precision("highest"):
        logits = x @ router.T + of_router
        least = jnp.sort(logits)[:, -SELECTED, None]
        weights = jax.nn.softmax(jnp.where(logits >= least, logits, -jnp.inf))
        gate = jnp.minimum(jnp.einsum("te,gfe->tgf", x, gate) + of_gate, 7)
        up = jnp.clip(jnp.einsum("te,gfe->tgf", x, up) + of_up, -7, 7)
        out = jnp.einsum("tgf,gef->tge", gate * jax.nn.sigmoid(1.702 * gate) * (up + 1), down)
        return jnp.einsum("tg,tge->te", weights, out + of_down)


def everything(x, router, gate, up, down, normalize=True):
    """All experts of all tokens, weighted by 0 where they are not selected."""
    with jax.default_matmul_precision("highest"):
        probabilities = jax.nn.softmax(x @ router.T)
        least = jnp.sort(probabilities)[:, -SELECTED, None]
        weights = jnp.where(probabilities >= least, probabilities, 0)
        weights /= jnp.sum(weights, axis=1, keepdims=True) if normalize else 1
        hidden = jax.nn.silu(jnp.einsum("te,gfe->tgf", x, gate))
        hidden *= jnp.einsum("te,gfe->tgf", x, up)
        return jnp.einsum("tg,tgf,gef->te", weights, hidden, down)


@functools.cache
def compiled(function):
    def total(*arguments):
        out = function(*arguments)
        return jnp.sum(out.astype(jnp.float32) * jnp.cos(jnp.arange(out.size)).reshape(out.shape))

    return jax.jit(lambda *x: (function(*x), jax.grad(total, range(len(x)))(*x)))


def with_gradients(function, arguments):
    return jax.tree.leaves(compiled(function)(*arguments))


def assert_agrees(actual):
    for ours, theirs in zip(actual, with_gradients(everything, example()), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def assert_those_of_gpt_oss_agree(function, tokens=TOKENS):
    x, *others = example()
    arguments = [x[:tokens], *others, *biases()]
    actual, expected = (with_gradients(f, arguments) for f in (function, all_of_gpt_oss))
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-4)


def test_experts_with_biases_and_limits():
    assert_those_of_gpt_oss_agree(gpt_oss, tokens=23)  # the last chunk is padded


@pytest.mark.parametrize("how", [(24, 1), (8, 0), (5, 2)])
def test_experts_and_their_gradients(how):
    actual = with_gradients(lambda *x: experts(*x, *how), example())
    assert_agrees(actual)
    assert not np.any(actual[3][-1])  # the gradient of an expert that no token selects


def test_weights_that_do_not_sum_to_one():
    expected = with_gradients(lambda *x: everything(*x, normalize=False), example())
    actual = with_gradients(lambda *x: experts(*x, 8, normalize=False), example())
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_bf16():
    arguments = example(jnp.bfloat16)
    exact = with_gradients(everything, [x.astype(jnp.float32) for x in arguments])
    actual = with_gradients(lambda *x: experts(*x, 8), arguments)
    for ours, theirs in zip(actual, exact, strict=True):
        assert ours.dtype == jnp.bfloat16
        error = jnp.linalg.norm(ours.astype(jnp.float32) - theirs) / jnp.linalg.norm(theirs)
        assert error < 2e-2


def test_frozen_experts_have_no_gradient():
    x, router, *matrices = example()

    def total(x, trained):
        return jnp.sum(experts(x, router, *matrices, 8, 0, trained))

    both = jax.jit(lambda x: [jax.grad(total)(x, trained) for trained in (True, False)])(x)
    np.testing.assert_array_equal(*both)
    count = {}
    for trained in (True, False):
        jaxpr = jax.make_jaxpr(jax.grad(lambda x, trained=trained: total(x, trained)))(x).jaxpr
        names = [e.primitive.name for e in equations(jaxpr)]
        count[trained] = names.count("ragged_dot_general")
    assert count[True] - count[False] == 3


@pytest.mark.parametrize(
    ("lengths", "golden"), [((24, 24), BALANCE_LOSSES[:2]), ((24, 17), BALANCE_LOSSES[::2])]
)
def test_balance_loss_is_that_of_transformers_without_padding(lengths, golden):
    """For one sequence; `load_balancing_loss_func` of transformers 5.24, in NumPy."""
    rng, layers, sequences = np.random.default_rng(1), 3, 2
    x = jnp.asarray(rng.normal(size=(layers, sequences, TOKENS, WIDTH)), jnp.float32)
    router = jnp.asarray(rng.normal(size=(layers, EXPERTS, WIDTH)), jnp.float32)
    real = jnp.asarray(np.arange(TOKENS) < np.array(lengths)[:, None], jnp.float32)

    def of_router(x, router):
        inputs = zip(x, router, strict=True)
        sums = [balance(route(*of_layer, SELECTED, True), real) for of_layer in inputs]
        return balance_loss(Balance(*(jnp.stack(s)[:, :, 0] for s in zip(*sums, strict=True))))

    found, loads = [], []
    for sequence, length in enumerate(lengths):
        logits = np.einsum("lte,lge->ltg", x[:, sequence, :length], router).reshape(-1, EXPERTS)
        weights = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        selected = np.eye(EXPERTS)[np.argsort(-weights)[:, :SELECTED]]  # [L * T, SELECTED, EXPERTS]
        found.append((selected.mean(0) * weights.mean(0)).sum() * EXPERTS)
        counts = selected.reshape(layers, -1, EXPERTS).sum(1)
        loads.append(counts.max(1) / counts.mean(1))
    np.testing.assert_allclose(found, golden, rtol=1e-5)
    (loss, load), gradient = jax.jit(jax.value_and_grad(of_router, has_aux=True))(x, router)
    np.testing.assert_allclose(loss, np.mean(found), rtol=1e-5)
    np.testing.assert_allclose(load, np.mean(loads, 0), rtol=1e-6)
    np.testing.assert_array_equal(np.any(gradient != 0, axis=(0, 3)), real > 0)


def test_a_sequence_of_padding_has_an_auxiliary_loss_of_0():
    """Of a batch from Python, such as the last one of an epoch; 0 / 0 would skip its step."""
    rng = np.random.default_rng(0)
    drawn = (jnp.asarray(rng.random((3, 1, EXPERTS)), jnp.float32) for _ in range(2))
    one = Balance(*drawn)
    both = Balance(*(jnp.concatenate([x, jnp.zeros_like(x)], axis=1) for x in one))
    (loss, load), gradient = jax.value_and_grad(balance_loss, has_aux=True)(both)
    expected, expected_load = balance_loss(one)
    np.testing.assert_allclose(loss, expected / 2, rtol=1e-6)
    np.testing.assert_allclose(load, expected_load / 2, rtol=1e-6)
    assert all(np.isfinite(x).all() for x in gradient)


def test_rematerialization_changes_nothing():
    specs = (tiny_spec(**MOE, mlp_chunk_size=8, **how) for how in ({}, REMAT))
    layers = [Experts(spec, spec.layer, "mlp", nnx.Rngs(0)) for spec in specs]
    x_BSE = jnp.asarray(np.random.default_rng(0).normal(size=(2, 12, 32)), jnp.float32)

    def total(state, graphdef):
        out, used = nnx.merge(graphdef, state)(x_BSE)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(used.probabilities))

    splits = [nnx.split(layer) for layer in layers]
    found = jax.jit(lambda state: [jax.grad(total)(state, x) for x, _ in splits])(splits[0][1])
    assert_states_close(found[1], found[0], tolerance=1e-5)


def test_kept_products_are_named():
    jaxpr = jax.make_jaxpr(lambda *x: experts(*x, 8, 1))(*example())
    assert MLP_PRODUCTS in str(jaxpr)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "num_experts_per_tok = 0 must be 1 to num_experts = 0"),
        ({"num_experts": 2, "num_experts_per_tok": 3}, "= 3 must be 1 to num_experts = 2"),
        ({"num_experts": -1}, "num_experts = -1 must not be negative"),
        (
            {"family": "qwen3", "num_experts": 8},
            'num_experts = 8 needs a family with experts, not "qwen3"; remove it',
        ),
        ({"family": "qwen3", "norm_topk_prob": False}, "norm_topk_prob = False needs a family wit"),
    ],
)
def test_numbers_of_experts_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_spec(**{"family": "qwen3_moe"} | fields)


def test_experts_have_no_adapters():
    tiny_spec(**MOE, lora=LoraSpec(2, 4.0, ("q_proj", "o_proj")))
    with pytest.raises(ValueError, match='"gate_proj" is not a projection of the model; choose fr'):
        tiny_spec(**MOE, lora=LoraSpec(2, 4.0, ("gate_proj",)))


def test_padded_rows_of_the_kernel(monkeypatch):
    """As with the Hopper kernel, which takes whole tiles and leaves other rows undefined."""
    numbers = {"dot": (((1,), (2,)), [0]), "transposed": (((1,), (1,)), [0])}

    def product(kind, a, b, sizes):
        contracted, groups = numbers.get(kind, (((0,), (0,)), []))
        numbering = jax.lax.RaggedDotDimensionNumbers((contracted, ((), ())), [0], groups)
        unused = jnp.arange(len(a))[:, None] >= jnp.sum(sizes)
        a = jnp.where(unused, 0, a) if kind == "outer" else a
        b = jnp.where(unused, 0, b) if kind == "outer" else b
        out = jax.lax.ragged_dot_general(a, b, sizes, numbering, precision="highest")
        wrong = jnp.any(sizes % 128 > 0) | (unused if kind != "outer" else False)
        return jnp.where(wrong, jnp.nan, out)

    monkeypatch.setattr(backends, "grouped_product", lambda *_: product)
    assert_agrees(with_gradients(lambda *x: experts(*x, 8), example()))

    def product_of_wide(kind, a, b, sizes):
        assert all(width % 16 == 0 for width in (a.shape[1], *b.shape[1:]))
        return product(kind, a, b, sizes)

    monkeypatch.setattr(backends, "grouped_product", lambda *_: product_of_wide)
    monkeypatch.setattr(backends, "grouped_widths", lambda *_: (16, 16))
    assert_those_of_gpt_oss_agree(lambda *x: gpt_oss(*x, how=(24, 0)))


def test_matrices_are_padded_for_the_kernel_if_little_is_added(monkeypatch):
    """2880 is the width of gpt-oss."""
    bf16 = jnp.dtype(jnp.bfloat16)
    assert backends.grouped_widths(bf16, (2880, 2880)) == (2880, 2880)
    monkeypatch.setattr(backends.device, "no_hopper_gpu", lambda: None)
    assert backends.grouped_widths(bf16, (2880, 2880)) == (3072, 3072)
    assert backends.grouped_widths(bf16, (2048, 768)) == (2048, 768)
    assert backends.grouped_widths(bf16, (2880, 640)) == (2880, 640)
    assert backends.grouped_widths(jnp.dtype(jnp.float32), (2880, 2880)) == (2880, 2880)
