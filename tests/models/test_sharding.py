import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mtraining_jax.models.fsdp import fsdp_apply
from mtraining_jax.models.transformer import abstract_state, init_model, param_shardings
from mtraining_jax.parallel.mesh import make_mesh
from tests.models.common import (
    assert_states_close,
    drawn,
    equations,
    next_token_loss,
    some_tokens,
    tiny_spec,
)

RANKS = ("node", "device")


def test_fsdp_shards_the_first_divisible_axis():
    spec = tiny_spec(vocab_size=63, num_kv_heads=1, num_heads=3, head_dim=4)
    shardings = nnx.to_pure_dict(param_shardings(spec, make_mesh(1, 2, 4), fsdp=True))
    # 63 rows do not divide by 8, 32 columns do.
    assert shardings["embed_tokens"]["weight"].spec == P(None, RANKS)
    attention = shardings["layers"]["self_attn"]
    assert attention["q_proj"]["weight"].spec == P(None, None, RANKS)  # 12 x 32
    assert attention["o_proj"]["weight"].spec == P(None, RANKS)  # 32 x 12
    assert attention["q_proj"]["bias"].spec == P()
    mlp = shardings["layers"]["mlp"]
    assert mlp["up_proj"]["weight"].spec == P(None, RANKS)
    assert shardings["norm"]["weight"].spec == P()


def test_fsdp_replicates_what_does_not_divide_and_says_so_once(caplog):
    spec = tiny_spec(hidden_size=30, intermediate_size=42, vocab_size=63, num_heads=2, head_dim=6)
    for _ in range(2):
        shardings = param_shardings(spec, make_mesh(1, 2, 4), fsdp=True)
    assert {sharding.spec for sharding in jax.tree.leaves(shardings)} == {P()}
    (record,) = caplog.records
    matrices = [name for name, x in spec.parameters.items() if "vector" not in x.axes]
    assert record.getMessage() == (
        f"parallel.fsdp replicates {len(matrices)} of the model's matrices, because 8 devices "
        f"divide none of their axes: {', '.join(matrices)}"
    )
    param_shardings(tiny_spec(), make_mesh(1, 2, 4), fsdp=True)
    param_shardings(spec, make_mesh(1, 2, 4), fsdp=False)
    assert len(caplog.records) == 1


def test_without_fsdp_everything_is_replicated():
    shardings = param_shardings(tiny_spec(), make_mesh(2, 2, 2), fsdp=False)
    assert jax.tree.structure(shardings) == jax.tree.structure(abstract_state(tiny_spec()))
    assert {sharding.spec for sharding in jax.tree.leaves(shardings)} == {P()}


def test_the_same_model_is_drawn_on_every_mesh():
    """Here, and in tests/training/test_state.py on two others."""
    spec, mesh = tiny_spec(), make_mesh(2, 2, 2)
    graphdef, expected = drawn(spec)
    other_graphdef, state = init_model(spec, seed=0, mesh=mesh, fsdp=True)
    assert other_graphdef == graphdef
    assert_states_close(state, expected, tolerance=0)
    wanted = param_shardings(spec, mesh, fsdp=True)
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    up = nnx.to_pure_dict(state)["layers"]["mlp"]["up_proj"]["weight"]
    assert up.addressable_shards[0].data.shape == (3, 48 // 4, 32)


def test_a_key_draws_the_same_as_its_seed():
    assert_states_close(
        init_model(tiny_spec(), seed=jax.random.key(0))[1], drawn(tiny_spec())[1], tolerance=0
    )


FULL = tiny_spec(remat="full")


def loss_and_gradients(state, tokens, mesh=None):
    graphdef, _ = drawn(FULL)
    return jax.value_and_grad(
        lambda state: next_token_loss(graphdef, state, tokens, mesh=mesh), has_aux=True
    )(state)


@functools.cache
def on_one_device():
    return jax.jit(loss_and_gradients)(drawn(FULL)[1], some_tokens(FULL, (4, 16)))


@pytest.mark.parametrize("fsdp", [pytest.param(False, marks=pytest.mark.slow), True])
def test_loss_and_gradients_do_not_depend_on_the_mesh(fsdp):
    spec, tokens, (_, state) = FULL, some_tokens(FULL, (4, 16)), drawn(FULL)
    (expected_loss, (expected_logits, _)), expected = on_one_device()

    mesh = make_mesh(2, 2, 2)
    shardings = param_shardings(spec, mesh, fsdp)
    sharded = jax.device_put(state, shardings)
    cut = jax.device_put(tokens, jax.NamedSharding(mesh, P("data", RANKS)))
    step = jax.jit(loss_and_gradients, static_argnums=2, out_shardings=(None, shardings))
    (loss, (logits, _)), gradients = step(sharded, cut, mesh)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    np.testing.assert_allclose(logits, expected_logits, atol=2e-5)
    assert_states_close(gradients, expected, tolerance=1e-5)


@pytest.mark.parametrize(("dtype", "of_matrices"), [(jnp.bfloat16, "bfloat16"), (None, "float32")])
def test_matrices_on_one_device_have_the_compute_dtype(dtype, of_matrices):
    weights = {"matrix": jnp.full((4, 3), 1.001), "vector": jnp.full(3, 1.001)}

    def function(weights, x):
        return weights | {"x": x}

    found = fsdp_apply(function, weights, jnp.ones((1, 2)), specs=None, mesh=None, dtype=dtype)
    assert {name: str(x.dtype) for name, x in found.items()} == {
        "matrix": of_matrices, "vector": "float32", "x": "float32",
    }  # fmt: skip
    np.testing.assert_array_equal(found["matrix"], weights["matrix"].astype(of_matrices))


COLLECTIVES = {"all_gather", "reduce_scatter", "psum", "all_to_all", "ppermute"}


def test_layer_weights_are_gathered_once_a_pass_and_not_per_chunk():
    # 64 tokens per device in 4 chunks.
    spec = tiny_spec(remat="attention", mlp_chunk_size=16, dtype="bfloat16")
    mesh = make_mesh(1, 2, 2)
    graphdef, tokens = drawn(spec)[0], some_tokens(spec, (1, 256))

    def attend(q, k, v):
        return q + jnp.repeat(k + v, 2, axis=2), {}

    def total(state):
        model = nnx.merge(graphdef, state)
        hidden, _ = model(tokens, jnp.arange(256), attend, mesh=mesh, fsdp=True)
        return hidden.sum()

    jaxpr = jax.jit(jax.grad(total)).trace(abstract_state(spec)).jaxpr
    layers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    assert [eqn.params["length"] for eqn in layers] == [spec.num_layers] * 2
    found, dtypes = [], collections.defaultdict(set)
    for layer in layers:
        inner = list(equations(layer.params["jaxpr"].jaxpr))
        found.append(collections.Counter(eqn.primitive.name for eqn in inner))
        for eqn in inner:
            dtypes[eqn.primitive.name].add(eqn.outvars[0].aval.dtype)
        chunks = [eqn for eqn in inner if eqn.primitive.name == "scan"]
        assert [eqn.params["length"] for eqn in chunks] == [4]
        in_chunks = {eqn.primitive.name for eqn in equations(chunks[0].params["jaxpr"].jaxpr)}
        assert "dot_general" in in_chunks and not in_chunks & COLLECTIVES
    # 7 matrices; the backward pass gathers them again, and computes a gradient for each.
    assert [count["all_gather"] for count in found] == [7, 7]
    assert [count["reduce_scatter"] for count in found] == [0, 7]
    assert dtypes["all_gather"] == {jnp.dtype("bfloat16")}
    assert dtypes["reduce_scatter"] == {jnp.dtype("float32")}
