"""LoRA adapters: against dense matrices W + s B A, on one and on several devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mtraining_jax.models.lora.adapters import LoraSpec, is_adapter
from mtraining_jax.models.lora.projection import Dropout, Projection, Projector, seeds_from
from mtraining_jax.models.loss import linear_cross_entropy
from mtraining_jax.models.sharding import parameter_names
from mtraining_jax.models.swiglu import chunked_swiglu
from mtraining_jax.models.transformer import (
    abstract_state,
    graph_definition,
    init_model,
    param_shardings,
)
from mtraining_jax.parallel.mesh import make_mesh
from tests.models.common import equations, forward, next_token_loss, some_tokens, tiny_spec
from tests.models.reference_attention import dense_attention

ALL = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
LORA = LoraSpec(4, 6.0, ALL)


def by_name(state):
    names = jax.tree.leaves(parameter_names(state))
    return dict(zip(names, jax.tree.leaves(state), strict=True))


def with_values(state, values):
    return jax.tree.map(lambda name, x: values.get(name, x), parameter_names(state), state)


@functools.cache
def adapted(spec):
    """A state with adapters that have an effect, and the state of the merged model."""
    _, state = init_model(spec, seed=0)
    _, plain = init_model(dataclasses.replace(spec, lora=None), seed=0)
    rng, values = np.random.default_rng(0), by_name(state)
    for name, x in values.items():
        if name.endswith("lora_B.weight"):
            assert not x.any()
            values[name] = jnp.asarray(rng.normal(size=x.shape) * 0.1, jnp.float32)
    return with_values(state, values), with_values(plain, merged(spec, values))


def merged(spec, values):
    found = {}
    for name, x in values.items():
        if not is_adapter(name):
            a, b = (values.get(f"{name[:-7]}.{f}.weight") for f in ("lora_A", "lora_B"))
            exact = jax.lax.Precision.HIGHEST
            delta = 0 if a is None else spec.lora.scale * jnp.matmul(b, a, precision=exact)
            found[name] = x + delta
    return found


def loss_and_gradients(spec, state, mesh):
    """The loss, and its gradients by the adapters."""
    graphdef, tokens = graph_definition(spec), some_tokens(spec)
    factors = {name: x for name, x in by_name(state).items() if is_adapter(name)}

    def loss(factors):
        return next_token_loss(graphdef, with_values(state, factors), tokens, mesh=mesh)[0]

    return jax.jit(jax.value_and_grad(loss))(factors)


def test_zero_adapters_change_no_bit_and_others_equal_merged_matrices():
    spec = tiny_spec(num_layers=2, lora=LORA, remat="attention", mlp_chunk_size=8)
    plain, tokens = dataclasses.replace(spec, lora=None), some_tokens(spec)
    run = functools.partial(forward, tokens=tokens, positions=jnp.arange(16))
    (_, fresh), (_, base) = (init_model(x, seed=0) for x in (spec, plain))
    expected = run(graph_definition(plain), base)
    for ours, theirs in zip(run(graph_definition(spec), fresh), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    state, whole = adapted(spec)
    ours, theirs = run(graph_definition(spec), state), run(graph_definition(plain), whole)
    assert np.abs(ours[1] - expected[1]).max() > 0.1
    np.testing.assert_allclose(ours[1], theirs[1], atol=2e-5)


MODEL = tiny_spec(num_layers=2, family="qwen3", lora=LORA)


@functools.cache
def expected_gradients():
    """Loss and gradients by the factors, through a model without adapters."""
    plain, values = dataclasses.replace(MODEL, lora=None), by_name(adapted(MODEL)[0])

    def dense(factors):
        whole = with_values(abstract_state(plain), merged(MODEL, values | factors))
        return next_token_loss(graph_definition(plain), whole, some_tokens(plain))[0]

    factors = {name: x for name, x in values.items() if is_adapter(name)}
    return jax.jit(jax.value_and_grad(dense))(factors)


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        (None, {"remat": "mlp", "mlp_chunk_size": 8, "mlp_kept_chunks": 1}),
        ((1, 2, 4), {"remat": "attention", "mlp_chunk_size": 2}),
    ],
)
def test_gradients_are_those_of_merged_matrices(mesh, changes):
    spec, state = dataclasses.replace(MODEL, **changes), adapted(MODEL)[0]
    loss, expected = expected_gradients()
    if mesh is not None:
        mesh = make_mesh(*mesh)
        state = jax.device_put(state, param_shardings(spec, mesh, fsdp=False))
    found_loss, found = loss_and_gradients(spec, state, mesh)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-5)
    assert len(found) == 2 * len(ALL)
    for name, gradient in found.items():
        error = jnp.linalg.norm(gradient - expected[name]) / jnp.linalg.norm(expected[name])
        assert error < 1e-5, name


@pytest.mark.parametrize("remat", ["none", "mlp"])
def test_a_frozen_base_has_no_gradients(remat):
    """No product or collective of the shape of a matrix, except for the gathers of weights."""
    spec = tiny_spec(lora=LORA, remat=remat, mlp_chunk_size=3, tie_word_embeddings=False)
    mesh, tokens = make_mesh(1, 1, 2), some_tokens(spec, (2, 12))
    positions = jnp.arange(12, dtype=jnp.int32)
    state = abstract_state(spec)

    def loss(factors, values):
        model = nnx.merge(graph_definition(spec), with_values(state, values | factors))
        attention = dense_attention(positions)
        hidden, _ = model(tokens, positions, attention, mesh=mesh, fsdp=True)
        weight = model.lm_head_weight()
        return linear_cross_entropy(
            hidden, weight, tokens, chunk_size=3, mesh=mesh, trains_weight=False
        )

    values = by_name(state)
    factors = {name: values.pop(name) for name in list(values) if is_adapter(name)}
    jaxpr = jax.make_jaxpr(jax.grad(loss))(factors, values).jaxpr
    matrices = [x for x in spec.parameters.values() if x.stddev is not None]
    sizes = {x.shape[-2] * x.shape[-1] // ranks for x in matrices for ranks in (1, 2)}
    made = [
        (eqn.primitive.name, eqn.outvars[0].aval.shape)
        for eqn in equations(jaxpr)
        if eqn.primitive.name in ("dot_general", "psum", "reduce_scatter", "psum_invariant")
    ]
    assert len(made) > 50
    assert not [x for x in made if len(x[1]) == 2 and np.prod(x[1]) in sizes]


def test_dropout_is_the_same_in_chunks_and_scales_what_it_keeps():
    lora, rng = dataclasses.replace(LORA, dropout=0.25), np.random.default_rng(0)

    def projection(rows, columns):
        shapes = (rows, columns), (lora.rank, columns), (rows, lora.rank)
        return Projection(*(jnp.asarray(rng.normal(size=x), jnp.float32) for x in shapes))

    x, parts = jnp.asarray(rng.normal(size=(24, 8)), jnp.float32), [projection(12, 8)] * 2
    parts.append(projection(8, 12))
    bits = jax.random.bits(jax.random.key(0), (2, 24), jnp.uint32)
    seeds, others = (Dropout.of_layer(seeds_from(x), jnp.int32(3)).seeds for x in bits)

    def whole(x, gate, up, down, seeds):
        project = Projector(lora, Dropout(seeds))
        hidden = jax.nn.silu(project(x, gate, "gate_proj")) * project(x, up, "up_proj")
        return project(hidden, down, "down_proj")

    def chunks(x, gate, up, down, seeds):
        return chunked_swiglu(x, gate, up, down, seeds, 5, 1, lora)

    def outcome(function, seeds):
        def total(x, *parts):
            out = function(x, *parts, seeds)
            return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out

        (_, out), gradients = jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True)(x, *parts)
        return out, gradients[0], [gradient[1:] for gradient in gradients[1:]]

    expected, found = (jax.jit(outcome, static_argnums=0)(f, seeds) for f in (whole, chunks))
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())
    assert np.abs(whole(x, *parts, others) - expected[0]).max() > 0.1
    ones = jnp.ones((24, 512))
    dropped = Dropout(seeds)(ones, 0.25, "q_proj")
    assert set(np.unique(dropped)) == {0, np.float32(1 / 0.75)}
    np.testing.assert_allclose(np.mean(dropped), 1, atol=0.03)
    assert not np.array_equal(dropped, Dropout(seeds)(ones, 0.25, "k_proj"))


def test_a_fresh_adapter_has_the_initial_values_of_peft():
    """A is uniform with a variance of a third of its width, as Kaiming's with a = sqrt(5)."""
    spec = tiny_spec(lora=dataclasses.replace(LORA, rank=64))
    first, other = (by_name(init_model(spec, seed=seed)[1]) for seed in (0, 1))
    name = "layers.mlp.up_proj.lora_A.weight"
    a, limit = np.asarray(first[name]), 32**-0.5
    assert a.shape == (3, 64, 32) and np.abs(a).max() <= limit
    np.testing.assert_allclose([a.min(), a.max()], [-limit, limit], rtol=0.01)
    np.testing.assert_allclose(a.std(axis=(1, 2)), limit / 3**0.5, rtol=0.05)
    assert not np.array_equal(a[0], a[1]) and not np.array_equal(a, other[name])
    assert not np.array_equal(a, first["layers.mlp.gate_proj.lora_A.weight"])
    assert not np.asarray(first["layers.mlp.up_proj.lora_B.weight"]).any()


def test_dropout_is_what_a_resumed_run_repeats():
    """Values as they are, because a run may resume with a later version."""
    seeds = seeds_from(jnp.asarray([1 << 8, 0xFFFFFFFF, 3 << 20], jnp.uint32))
    np.testing.assert_array_equal(seeds, [1, 2**24 - 1, 3 << 12])
    layers = [Dropout.of_layer(seeds, jnp.int32(layer)).seeds for layer in (0, 1)]
    np.testing.assert_array_equal(
        layers, [[6850960, 12318437, 8329980], [3114560, 16538008, 2952011]]
    )
    kept = Dropout(seeds)(jnp.ones((3, 8)), 0.5, "q_proj") > 0
    np.testing.assert_array_equal(np.packbits(kept), [217, 228, 8])
