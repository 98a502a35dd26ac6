"""Against transformers 5.17 in fp32: the golden files hold its outputs on the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mtraining_jax.models import Qwen2
from mtraining_jax.models.hf import load_hf, read_hf_config
from tests.models.common import DATA, FIXTURES, next_token_loss


@pytest.fixture(scope="module", params=FIXTURES)
def outcome(request):
    directory = DATA / request.param
    golden = np.load(directory / "golden.npz")
    spec = read_hf_config(directory, dtype="float32", remat="none")
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Qwen2(spec, rngs=nnx.Rngs(0))))
    state = load_hf(directory, spec)

    @jax.jit
    def run(state, tokens):
        return jax.value_and_grad(
            lambda state: next_token_loss(graphdef, state, tokens), has_aux=True
        )(state)

    (loss, (logits, _)), gradients = run(state, jnp.asarray(golden["input_ids"]))
    return golden, loss, logits, nnx.to_pure_dict(gradients)["layers"]


def test_logits(outcome):
    golden, _, logits, _ = outcome
    assert np.abs(logits - golden["logits"]).max() <= 2e-4


def test_loss(outcome):
    golden, loss, _, _ = outcome
    np.testing.assert_allclose(loss, golden["loss"], rtol=1e-6)


def test_gradients(outcome):
    golden, _, _, layers = outcome
    bias = layers["self_attn"]["q_proj"]["bias"][0]
    np.testing.assert_allclose(bias, golden["grad_q_proj_bias_0"], atol=1e-6, rtol=1e-4)
    down = layers["mlp"]["down_proj"]["weight"][-1]
    np.testing.assert_allclose(down, golden["grad_down_proj_last"], atol=1e-6, rtol=1e-4)
