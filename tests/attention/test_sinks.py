"""Attention sinks against softmax with one more column, on one device and on eight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mtraining_jax import Documents, Layout, Sharding, sparse_attention, stripe, unstripe
from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.models.transformer import abstract_state, graph_definition
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.patterns.sampled_rows import SampledRows
from tests.attention.inputs import with_residuals
from tests.models.common import some_tokens, tiny_spec

TOKENS, SIZE = 256, 16
DOCUMENTS = Documents.from_lengths([(100, 60, 40)], TOKENS, SIZE)  # and two blocks of padding


def eager(q, k, v, sinks, mask):
    """The formula of transformers (`eager_attention_forward` of gpt-oss), with a mask [H, S, S]."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    with jax.default_matmul_precision("highest"):
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        logits = jnp.where(mask, logits, -1e30)
        column = jnp.broadcast_to(sinks[None, :, None, None], (*logits.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([logits, column], axis=-1))[..., :-1]
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@functools.cache
def inputs():
    """q, k, v, sinks and the gradient of out."""
    rng = np.random.default_rng(0)
    shapes = (1, TOKENS, 4, 8), (1, TOKENS, 2, 8), (1, TOKENS, 2, 8), (4,), (1, TOKENS, 4, 8)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    arrays[3] += jnp.array([-2.0, 0, 2, 5])
    return arrays


def with_gradients(attend, *arrays):
    *arrays, dout = arrays
    out, vjp = jax.vjp(attend, *arrays)
    return out, *vjp(dout)


def test_sinks_agree_with_softmax_over_one_more_column():
    pattern = SampledRows(block_size=SIZE, tau=0.5, min_sparse_tokens=1)

    def attend(q, k, v, sinks, **how):
        how |= {"pattern": pattern, "documents": DOCUMENTS, "sinks": sinks}
        return sparse_attention(q, k, v, **how)

    q, k, v, *_ = inputs()
    *_, index = with_residuals(q, k, v, pattern=pattern, documents=DOCUMENTS)
    mask = index.to_mask(TOKENS)
    wanted = jax.jit(lambda *x: with_gradients(lambda *y: eager(*y, mask), *x))(*inputs())
    found = jax.jit(functools.partial(with_gradients, attend))(*inputs())
    layout = Layout("striped", TOKENS, 8, SIZE, 2)
    ring = functools.partial(attend, sharding=Sharding(make_mesh(1, 2, 4), order=layout))

    @jax.jit
    def over_devices(q, k, v, sinks, dout):
        q, k, v, dout = (stripe(x, layout) for x in (q, k, v, dout))
        out, dq, dk, dv, d_sinks = with_gradients(ring, q, k, v, sinks, dout)
        return *(unstripe(x, layout) for x in (out, dq, dk, dv)), d_sinks

    for result in (found, over_devices(*inputs())):
        for ours, theirs in zip(result, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


def test_heads_may_be_sharded():
    arrays = inputs()
    plain = functools.partial(sparse_attention, pattern=Dense(SIZE))
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    how = {"sharding": Sharding(mesh, heads="heads", sequence=())}
    attends = [lambda *x, how=how: plain(*x[:3], sinks=x[3], **how) for how in ({}, how)]
    both = [jax.jit(functools.partial(with_gradients, attend))(*arrays) for attend in attends]
    for ours, theirs in zip(*both, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_very_low_sinks_change_nothing_and_very_high_ones_take_everything():
    q, k, v, _, _ = inputs()
    plain = functools.partial(sparse_attention, q, k, v, pattern=Dense(SIZE))
    np.testing.assert_array_equal(plain(sinks=jnp.full(4, -1e4)), plain())
    assert not np.any(plain(sinks=jnp.full(4, 1e4)))
    _, with_sinks = plain(sinks=jnp.zeros(4), return_residuals=True)
    np.testing.assert_array_equal(with_sinks.lse, plain(return_residuals=True)[1].lse)


def test_infinitely_low_sinks_change_nothing():
    """Also in rows without pairs; a list is an array."""
    q, k, v, *_ = inputs()

    def attend(q, sinks):
        how = {"pattern": Dense(SIZE), "documents": DOCUMENTS}
        return sparse_attention(q, k, v, sinks=sinks, **how)

    both = [
        with_gradients(functools.partial(attend, sinks=x), q, v.repeat(2, 2))
        for x in ([-jnp.inf] * 4, None)
    ]
    for ours, theirs in zip(*both, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_all_layers_of_a_model_have_the_same_sinks():
    """More layers than heads."""
    spec = tiny_spec(num_heads=2, num_kv_heads=1)
    tokens, sinks = some_tokens(spec), jnp.zeros(2)

    def attention(q, k, v, inputs):
        assert inputs.sinks.shape == (2,)
        return q, {}

    def run(state, sinks):
        model = nnx.merge(graph_definition(spec), state)
        inputs = AttentionInputs(sinks=sinks)
        return model(tokens, jnp.arange(16), attention, attention_inputs=inputs)[0]

    assert jax.eval_shape(run, abstract_state(spec), sinks).shape == (2, 16, 32)


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (jnp.zeros(3), r"sinks has shape \[3\]; expected \[4\], one per head of q"),
        (jnp.zeros(4, jnp.int32), "sinks has dtype int32; it must be floating-point"),
    ],
)
def test_sinks_are_checked(sinks, message):
    q, k, v, *_ = inputs()
    with pytest.raises(ValueError, match=message):
        sparse_attention(q, k, v, pattern=Dense(SIZE), sinks=sinks)
