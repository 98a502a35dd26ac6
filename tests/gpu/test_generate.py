"""Prompts and generated tokens on a GPU, against the same model in fp32."""

import dataclasses
import functools

import jax
import numpy as np

from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.models.transformer import init_model
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from mtraining_jax.tools.evaluate.engine.engine import Engine
from mtraining_jax.tools.evaluate.engine.network import Network
from mtraining_jax.tools.evaluate.engine.options import GenerateOptions
from mtraining_jax.tools.evaluate.load import Loaded, in_compute_dtype

PROMPT, NEW = 1900, 8  # padded to 2048
TEXT = np.random.default_rng(0).integers(0, 1000, PROMPT + NEW).astype(np.int32)
SPARSE = VerticalSlash(0.5, 256, 8, min_verticals=64, min_slashes=4, local_blocks=1)
# A random model with sharp attention, so that a pattern can select.
SPEC = ModelSpec(
    vocab_size=1000, hidden_size=512, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=64,
    intermediate_size=1024, initializer_range=0.08, max_position_embeddings=4096,
)  # fmt: skip


@functools.cache
def dense(dtype: str, backend: str) -> Engine:
    spec = dataclasses.replace(SPEC, dtype=dtype)
    mesh = make_mesh(1, 1, 1, jax.devices()[:1])
    state = in_compute_dtype(init_model(spec, seed=0, mesh=mesh)[1], spec)
    network = Network(spec, mesh, Dense(), backend=backend)
    return Engine(Loaded(network, state, None, frozenset(), "random"))


@functools.cache
def in_fp32() -> np.ndarray:
    with jax.default_matmul_precision("highest"):
        return dense("float32", "xla").forced(TEXT[:PROMPT], TEXT[PROMPT:]).log_probs


def off(log_probs: np.ndarray) -> float:
    """Root mean square difference from fp32."""
    return float(np.sqrt(np.mean((log_probs - in_fp32()) ** 2)))


def decoded(engine: Engine) -> tuple[np.ndarray, float]:
    """Log-probabilities of the text's last tokens, one at a time, and the prompt's density."""
    programs = engine.programs
    prompt = programs.prefill(TEXT[:PROMPT], PROMPT)()
    first = jax.nn.log_softmax(prompt.logits)[0, TEXT[PROMPT]]
    density = float(prompt.density)
    token = jax.device_put(TEXT[[PROMPT]], prompt.density.sharding)
    how = TEXT[PROMPT + 1 :, None], PROMPT, NEW, GenerateOptions(), PROMPT
    parts = [x.log_probs[:, 0] for x in programs.decoder(prompt, token, *how)]
    return np.concatenate([[first], *parts])[:NEW], density


def test_generated_and_given_answers_have_the_rounding_errors_of_xla():
    # bfloat16 rounding changes log-probabilities by a few hundredths; a wrong cache slot, a wrong
    # position or a missing key by as much as they differ from each other.
    engine = dense("bfloat16", "mosaic_gpu")
    one_by_one, density = decoded(engine)
    at_once = engine.forced(TEXT[:PROMPT], TEXT[PROMPT:])
    rounding = off(dense("bfloat16", "xla").forced(TEXT[:PROMPT], TEXT[PROMPT:]).log_probs)
    found = {"one by one": off(one_by_one), "at once": off(at_once.log_probs), "xla": rounding}
    print(found)
    assert max(found.values()) < 2 * rounding and rounding < 0.1, found
    assert in_fp32().std() > 1
    assert density == at_once.density == 1


def test_an_answer_after_a_sparse_prompt_is_scored_as_if_generated():
    engine = dense("bfloat16", "mosaic_gpu").with_pattern(SPARSE)
    one_by_one, density = decoded(engine)
    forced = engine.forced(TEXT[:PROMPT], TEXT[PROMPT:])
    assert forced.density == density < 0.8
    np.testing.assert_allclose(forced.log_probs, one_by_one, atol=1e-3)
    assert np.abs(forced.log_probs - in_fp32()).max() > 0.1  # the prompt used sparse attention
