import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.models.remat import scan_kinds
from mtraining_jax.models.sharding import parameter_names
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.models.transformer import abstract_state, graph_definition, init_model
from mtraining_jax.parallel.layout import Layout
from tests.models.common import (
    assert_states_close,
    drawn,
    equations,
    forward,
    next_token_loss,
    some_tokens,
    tiny_spec,
)
from tests.models.reference_attention import dense_attention


@jax.custom_vjp
def named_attention(q, k, v):
    return named_attention_forward(q, k, v)[0]


def named_attention_forward(q, k, v):
    """Linear causal attention that names what its backward pass needs, like the real kernels."""
    index = checkpoint_name(jnp.arange(q.shape[1], dtype=jnp.int32), "sparse_index")
    mask = index[:, None] >= index[None]
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    # erf marks the forward kernel: it occurs nowhere else in the model.
    weights = jax.lax.erf(jnp.einsum("bqhd,bkhd->bhqk", q, k)) * mask
    lse = checkpoint_name(weights.sum(-1), "attn_lse")
    out = checkpoint_name(jnp.einsum("bhqk,bkhd->bqhd", weights, v), "attn_out")
    return out, (q, k, v, out, lse, index)


def named_attention_backward(residuals, d_out):
    q, k, v, out, lse, index = residuals
    scale = 1 + lse.mean() + index[-1]

    def fold(x):
        return x.reshape(*x.shape[:2], 2, -1, x.shape[-1]).sum(3)

    return d_out * scale, fold(d_out * out), fold(d_out * (q + k + v))


named_attention.defvjp(named_attention_forward, named_attention_backward)


def attend_by_name(q, k, v):
    out = named_attention(q, k, v)
    return out, {"size": jnp.abs(out).mean()}


def trace(spec, state, tokens, attention):
    graphdef = graph_definition(spec)
    return jax.jit(
        jax.value_and_grad(
            lambda state: next_token_loss(graphdef, state, tokens, attention), has_aux=True
        )
    ).trace(state)


def test_remat_policies_give_equal_gradients():
    """With a policy of each kind; `test_only_unsaved_values_are_recomputed` has all."""
    spec = tiny_spec()
    tokens = some_tokens(spec)
    _, state = drawn(spec)
    outcomes = {}
    kept = {"remat": "mlp", "mlp_chunk_size": 8, "mlp_kept_chunks": 1}  # of four
    kinds = {"mlp, some kept": kept} | {
        remat: {"remat": remat} for remat in ("none", "full_offload")
    }
    for kind, changes in kinds.items():
        traced = trace(tiny_spec(**changes), state, tokens, attend_by_name)
        outcomes[kind] = traced.lower().compile()(state)
    (loss, _), gradients = outcomes["none"]
    assert max(jnp.abs(leaf).max() for leaf in jax.tree.leaves(gradients)) > 1e-3
    for kind in kinds.keys() - {"none"}:
        (other_loss, _), other_gradients = outcomes[kind]
        np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
        assert_states_close(other_gradients, gradients, tolerance=1e-5)


def test_in_bfloat16_remat_is_bit_identical():
    # XLA may skip a rounding to bf16 between two fused operations, but not where a value is saved.
    # With this option off, the result does not depend on what a policy saves.
    tokens = some_tokens(tiny_spec())
    _, state = drawn(tiny_spec())

    def outcome(**changes):
        traced = trace(tiny_spec(dtype="bfloat16", **changes), state, tokens, attend_by_name)
        options = {"xla_allow_excess_precision": False}
        return traced.lower().compile(compiler_options=options)(state)

    (loss, _), gradients = outcome(remat="attention")
    (other_loss, _), others = outcome(remat="mlp", mlp_chunk_size=8, mlp_kept_chunks=1)
    assert other_loss == loss
    assert_states_close(others, gradients, tolerance=0)


@pytest.mark.parametrize(
    # Products with the parameters of one layer: 7 forward, 14 backward, and the recomputed ones.
    ("remat", "kept_chunks", "attentions", "products"),
    [
        ("none", 0, 1, 21),
        ("mlp", 1, 1, 21),  # all chunks saved
        ("mlp", 0, 1, 23),
        ("attention", 0, 1, 27),
        ("attention_offload", 0, 1, 27),
        ("full_offload", 0, 1, 27),
        ("full", 0, 2, 27),
    ],
)
def test_only_unsaved_values_are_recomputed(remat, kept_chunks, attentions, products):
    spec = tiny_spec(remat=remat, mlp_kept_chunks=kept_chunks)
    traced = trace(spec, abstract_state(spec), some_tokens(spec), attend_by_name)
    assert str(traced.jaxpr).count(" erf ") == attentions
    layers = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "scan"]
    found = [
        eqn
        for layer in layers
        for eqn in equations(layer.params["jaxpr"].jaxpr)
        if eqn.primitive.name == "dot_general"
        and {len(x.aval.shape) for x in eqn.invars} <= {2, 3}  # attention's have 4
    ]
    assert len(found) == products


def test_a_permuted_sequence_gives_the_permuted_result():
    graphdef, state = drawn(tiny_spec())
    tokens = some_tokens(tiny_spec())
    straight = jnp.arange(16, dtype=jnp.int32)
    striped = jnp.asarray(
        Layout("striped", seq_len=16, num_ranks=4, block_size=2).permutation(), jnp.int32
    )
    expected, _ = forward(graphdef, state, tokens, straight)
    actual, _ = forward(graphdef, state, tokens[:, striped], striped)
    np.testing.assert_allclose(actual, expected[:, striped], atol=1e-5)
    assert np.abs(np.asarray(actual - expected)).max() > 0.1

    both = jnp.stack([striped, straight])
    mixed = jnp.stack([tokens[0, striped], tokens[1]])
    actual, _ = forward(graphdef, state, mixed, both)
    np.testing.assert_allclose(actual[0], expected[0, striped], atol=1e-5)
    np.testing.assert_allclose(actual[1], expected[1], atol=1e-5)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_each_layer_gets_its_own_inputs(remat):
    spec = tiny_spec(remat=remat)
    graphdef, state = drawn(spec)
    tokens = some_tokens(spec)
    positions = jnp.arange(16, dtype=jnp.int32)

    def attention(q, k, v, inputs):
        out, _ = dense_attention(positions)(q, k, v)
        stats = {"gain": inputs.observer, "sum": (inputs.overrides["tau"] * inputs.sinks).sum()}
        return out * inputs.observer, stats

    inputs = AttentionInputs(
        observer=jnp.array([1.0, 2.0, 0.5]),
        overrides={"tau": jnp.ones((3, 4), jnp.int32)},
        sinks=jnp.int32(2),
    )

    @jax.jit
    def run(inputs):
        model = nnx.merge(graphdef, state)
        return model(tokens, positions, attention, attention_inputs=inputs)

    _, stats = run(inputs)
    np.testing.assert_array_equal(stats["gain"], [1.0, 2.0, 0.5])
    np.testing.assert_array_equal(stats["sum"], [8, 8, 8])  # sinks are those of all layers
    assert stats["gain"].dtype == jnp.float32 and stats["sum"].dtype == jnp.int32


@pytest.mark.parametrize("kinds", ["aab", "aabaabaa", "abababa", "bbb"])
def test_layers_of_several_kinds_run_in_order(kinds):
    weights = jnp.arange(1.0, len(kinds) + 1)
    layers = {
        "a": lambda x, w: (x * w, {"of_all": x}),
        "b": lambda x, w: (x + w, {"of_all": x, "of_b": {"w": w, "n": jnp.int32(1)}}),
    }
    found, stats = jax.jit(lambda w: scan_kinds(layers, tuple(kinds), 1.0, w))(weights)
    x, before, of_b = 1.0, [], []
    for kind, weight in zip(kinds, weights.tolist(), strict=True):
        before.append(x)
        x = x * weight if kind == "a" else x + weight
        of_b.append(weight if kind == "b" else np.nan)
    assert found == x
    np.testing.assert_array_equal(stats["of_all"], before)
    np.testing.assert_array_equal(stats["of_b"]["w"], of_b)
    np.testing.assert_array_equal(stats["of_b"]["n"], np.isfinite(of_b))


def test_no_gradient_flows_through_stats():
    spec = tiny_spec()
    graphdef, state = drawn(spec)
    tokens = some_tokens(spec)

    def total(state):
        _, (_, stats) = next_token_loss(graphdef, state, tokens, attend_by_name)
        return stats["size"].sum()

    gradients = jax.jit(jax.grad(total))(state)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_bfloat16_computes_near_float32_and_keeps_float32_parameters():
    spec = tiny_spec(dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(abstract_state(spec))} == {jnp.dtype("float32")}
    graphdef, state = drawn(spec)
    positions = jnp.arange(16, dtype=jnp.int32)
    tokens = some_tokens(tiny_spec())
    hidden, logits = forward(graphdef, state, tokens, positions)
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    expected, _ = forward(drawn(tiny_spec())[0], state, tokens, positions)
    difference = np.asarray(hidden, np.float32) - np.asarray(expected)
    assert 0 < np.sqrt(np.mean(difference**2)) < 0.05 * np.asarray(expected).std()


def test_the_gradient_of_a_frequent_token_adds_in_float32():
    # A bf16 sum of 1024 equal terms would stop growing at 256 of them.
    spec = tiny_spec(dtype="bfloat16", tie_word_embeddings=False)
    graphdef, state = drawn(spec)
    tokens = jnp.full((1, 1024), 5, jnp.int32)
    positions = jnp.zeros(1024, jnp.int32)

    def total(state, tokens, positions):
        model = nnx.merge(graphdef, state)
        hidden, _ = model(tokens, positions, lambda q, k, v: (q * 0, {}))
        return hidden[..., 0].astype(jnp.float32).sum()

    def row(length):
        gradients = jax.jit(jax.grad(total))(state, tokens[:, :length], positions[:length])
        return np.asarray(nnx.to_pure_dict(gradients)["embed_tokens"]["weight"][5])

    np.testing.assert_allclose(row(1024), 1024 * row(1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_weight_is_the_embedding_only_when_tied(tied):
    spec = tiny_spec(tie_word_embeddings=tied)
    model = nnx.merge(*drawn(spec))
    assert model.lm_head_weight().shape == (64, 32)
    same = np.array_equal(model.lm_head_weight(), model.embed_tokens.weight[...])
    assert same is tied


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_named_as_in_hugging_face(tied):
    state = abstract_state(tiny_spec(tie_word_embeddings=tied))
    names = parameter_names(state)
    assert jax.tree.structure(names) == jax.tree.structure(state)
    flat = jax.tree.leaves(names)
    assert set(flat) == set(QWEN2) - ({"lm_head.weight"} if tied else set())
    assert len([name for name in flat if "self_attn" in name]) == 7
    assert [name for name in flat if "self_attn.q_proj" in name] == [
        "layers.self_attn.q_proj.bias",
        "layers.self_attn.q_proj.weight",
    ]
    # The same for a pure dict, which some tools prefer.
    assert jax.tree.leaves(parameter_names(nnx.to_pure_dict(state))) == flat


# Names in the states of checkpoints: they must not change.
QWEN2 = (
    "embed_tokens.weight", "norm.weight", "lm_head.weight",
    *(f"layers.self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")),
    "layers.self_attn.o_proj.weight",
    *(f"layers.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "layers.input_layernorm.weight", "layers.post_attention_layernorm.weight",
)  # fmt: skip


def test_layers_are_drawn_independently_with_the_given_deviation():
    _, state = drawn(tiny_spec())
    weight = np.asarray(nnx.to_pure_dict(state)["layers"]["mlp"]["up_proj"]["weight"])
    assert not np.array_equal(weight[0], weight[1])
    np.testing.assert_allclose(weight.std(), 0.2, rtol=0.05)
    _, other = init_model(tiny_spec(), seed=1)
    other_weight = nnx.to_pure_dict(other)["layers"]["mlp"]["up_proj"]["weight"]
    assert not np.array_equal(weight, other_weight)


def test_any_object_with_the_fields_is_a_config():
    scaling = {"factor": 4.0, "original_max_position_embeddings": 64}
    spec = ModelSpec.from_config(vars(tiny_spec()) | {"rope_scaling": scaling})
    scaling = types.SimpleNamespace(
        type="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=None
    )
    section = types.SimpleNamespace(**(vars(spec) | {"rope_scaling": scaling, "init_from": None}))
    assert ModelSpec.from_config(section) == spec
    assert hash(ModelSpec.from_config(section)) == hash(spec)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "num_heads = 3 must be a multiple of num_kv_heads = 2"),
        ({"head_dim": 7}, "head_dim = 7 must be even"),
        ({"num_layers": 0}, "num_layers = 0 must be positive"),
        ({"dtype": "float16"}, 'dtype = "float16" must be one of bfloat16, float32'),
        ({"mlp_kept_chunks": -1}, "mlp_kept_chunks = -1 must not be negative"),
        ({"mlp_kept_chunks": 1}, 'mlp_kept_chunks = 1 needs remat = "mlp", but it is "none"'),
        ({"family": "gpt9"}, 'unknown model family "gpt9"; choose one of qwen2, qwen3, llama'),
        ({"sliding_window": 8}, "sliding_window = 8 needs a family that has it: .*mistral"),
        (
            {"family": "gemma3_text", "window_rope_theta": 1e4},
            "window_rope_theta = 10000.0 needs sliding_window",
        ),
        ({"family": "mistral", "sliding_window": 1}, "sliding_window = 1 must be more than 1"),
        ({"remat": "some"}, 'remat = "some" must be one of none, mlp, attention, attention_off'),
    ],
)
def test_an_invalid_model_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_spec(**changes)


def test_a_config_without_a_required_field_is_refused():
    with pytest.raises(ValueError, match="vocab_size is missing"):
        ModelSpec.from_config({"hidden_size": 8})
    with pytest.raises(ValueError, match="a str is not a model; pass a ModelSpec"):
        ModelSpec.from_config("path")
