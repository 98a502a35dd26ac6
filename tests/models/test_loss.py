import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.models.loss import count_labels, linear_cross_entropy
from mtraining_jax.parallel.mesh import make_mesh

MESH, FSDP = make_mesh(2, 2, 2), P(None, ("node", "device"))
BATCH, SEQ, WIDTH, VOCAB = 2, 32, 16, 37


def example(dtype=jnp.float32, seq=SEQ):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(BATCH, seq, WIDTH)), dtype)
    weight = jnp.asarray(rng.normal(size=(VOCAB, WIDTH)), jnp.float32)
    labels = rng.integers(0, VOCAB, (BATCH, seq))
    labels[rng.random(labels.shape) < 0.2] = IGNORE_LABEL
    labels[1, :] = IGNORE_LABEL  # a row with nothing to count
    labels[1, 3] = VOCAB - 1
    return hidden, weight, jnp.asarray(labels, jnp.int32)


def dense(hidden, weight, labels, label_weights=1):
    """The full logits by another formula: one-hot labels and log_softmax."""
    logits = jnp.einsum("bse,ve->bsv", hidden, weight.astype(hidden.dtype), precision="highest")
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    of_labels = jax.nn.one_hot(labels, VOCAB) * log_probabilities  # one_hot(-100) is 0
    return -jnp.sum(jnp.sum(of_labels, axis=-1) * label_weights)


@pytest.mark.parametrize(
    "chunk_size, weight_spec, seq",
    [
        (1, None, SEQ), (7, None, SEQ), (1000, None, SEQ), (3, P(), SEQ), (4, FSDP, SEQ),
        (100, P(), SEQ), (16, None, 31), (5, FSDP, 4 * 13),  # with padding
    ],
)  # fmt: skip
def test_equals_dense_loss_and_gradients(chunk_size, weight_spec, seq):
    hidden, weight, labels = example(seq=seq)
    on_mesh = {} if weight_spec is None else {"mesh": MESH, "weight_spec": weight_spec}

    def chunked(hidden, weight):
        total = linear_cross_entropy(hidden, weight, labels, chunk_size=chunk_size, **on_mesh)
        return total / count_labels(labels)

    def expected(hidden, weight):
        return dense(hidden, weight, labels) / np.sum(np.asarray(labels) >= 0)

    loss, gradients = jax.jit(jax.value_and_grad(chunked, (0, 1)))(hidden, weight)
    loss_expected, gradients_expected = jax.value_and_grad(expected, (0, 1))(hidden, weight)
    np.testing.assert_allclose(loss, loss_expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(chunked)(hidden, weight), loss_expected, rtol=1e-6)
    for actual, wanted in zip(gradients, gradients_expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("on_mesh", "seq"), [(False, 31), (True, SEQ)])
def test_labels_may_have_weights(on_mesh, seq):
    hidden, weight, labels = example(seq=seq)
    label_weights = jnp.asarray(np.random.default_rng(1).random(labels.shape), jnp.float32)
    mesh = MESH if on_mesh else None

    def chunked(hidden, weight):
        return linear_cross_entropy(
            hidden, weight, labels, chunk_size=4, mesh=mesh, label_weights_BS=label_weights
        )

    def expected(hidden, weight):
        return dense(hidden, weight, labels, label_weights)

    found = jax.jit(jax.value_and_grad(chunked, (0, 1)))(hidden, weight)
    wanted = jax.value_and_grad(expected, (0, 1))(hidden, weight)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-5, atol=1e-5)


def test_bf16_hidden_gives_fp32_weight_gradients_close_to_fp32():
    hidden, weight, labels = example(jnp.bfloat16)

    def chunked(hidden, weight):
        return linear_cross_entropy(hidden, weight, labels, chunk_size=8) / 26

    d_hidden, d_weight = jax.jit(jax.grad(chunked, (0, 1)))(hidden, weight)
    assert d_hidden.dtype == jnp.bfloat16 and d_weight.dtype == jnp.float32
    exact = jax.grad(lambda h, w: dense(h, w, labels) / 26, (0, 1))(
        hidden.astype(jnp.float32), weight
    )
    for actual, wanted in zip((d_hidden, d_weight), exact, strict=True):
        error = jnp.linalg.norm(actual.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)
        assert error < 1e-2  # bf16 keeps 8 bits


def test_a_mean_over_tokens_is_rounded_to_bf16_once():
    hidden, weight, labels = example(jnp.bfloat16)

    def gradient(scale):
        def loss(hidden):
            return scale * linear_cross_entropy(hidden, weight, labels, chunk_size=8)

        return jax.jit(jax.grad(loss))(hidden)

    scale = np.float32(1 / 26)  # not a number of bf16
    once = (gradient(1.0).astype(jnp.float32) * scale).astype(jnp.bfloat16)
    np.testing.assert_array_equal(gradient(scale), once)


def test_no_array_of_all_logits_is_formed():
    hidden, weight, labels = example()

    def chunked(hidden, weight):
        return linear_cross_entropy(hidden, weight, labels, chunk_size=8)

    jaxpr = str(jax.make_jaxpr(jax.grad(chunked, (0, 1)))(hidden, weight))
    assert f"f32[8,{VOCAB}]" in jaxpr
    assert f"[{BATCH},{SEQ},{VOCAB}]" not in jaxpr
    assert f"[{BATCH * SEQ},{VOCAB}]" not in jaxpr
    assert f"[{BATCH * SEQ // 8},8,{VOCAB}]" not in jaxpr


def test_shapes_that_do_not_fit_are_refused():
    hidden, weight, labels = example()
    with pytest.raises(ValueError, match="must be \\[B, S, E\\], \\[V, E\\] and \\[B, S\\]"):
        linear_cross_entropy(hidden, weight.T, labels, chunk_size=8)
    with pytest.raises(ValueError, match="chunk_size=0"):
        linear_cross_entropy(hidden, weight, labels, chunk_size=0)
