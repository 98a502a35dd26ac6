"""Prompts and new tokens on a GPU, against one pass over all tokens by the same kernels."""

import functools

import jax
import numpy as np
import pytest

from mtraining_jax.evaluation.engine import Engine
from mtraining_jax.evaluation.load import Loaded, in_compute_dtype
from mtraining_jax.evaluation.network import Attending, Network
from mtraining_jax.models import ModelSpec, init_model
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.sparsity import Dense, VerticalSlash

PROMPT, NEW = 1900, 8  # padded to 2048
TEXT = np.random.default_rng(0).integers(0, 1000, PROMPT + NEW).astype(np.int32)
SPARSE = VerticalSlash(0.5, 256, 8, min_verticals=64, min_slashes=4, local_blocks=1)


@functools.cache
def dense() -> Engine:
    """A random model in bfloat16, sharp enough for a pattern to choose."""
    spec = ModelSpec(
        vocab_size=1000, hidden_size=512, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=64,
        intermediate_size=1024, initializer_range=0.08, max_position_embeddings=4096,
    )  # fmt: skip
    mesh = make_mesh(1, 1, 1, jax.devices()[:1])
    state = in_compute_dtype(init_model(spec, seed=0, mesh=mesh)[1], spec)
    network = Network(spec, mesh, Attending(Dense(), backend="mosaic_gpu"))
    return Engine(Loaded(network, state, None, frozenset(), 1024, "random"))


@pytest.mark.parametrize("pattern", [Dense(), SPARSE], ids=["dense", "sparse"])
def test_log_probabilities_are_those_of_one_pass(pattern):
    engine = dense().with_pattern(pattern)
    programs, drawing = engine.programs, (np.float32(0), np.float32(1), np.uint32(0))
    prompt = programs.prefill(TEXT[:PROMPT], len(TEXT))()
    logits = [np.asarray(prompt.logits[0])]
    token = programs.draw(prompt.logits, "greedy", drawing)
    density = float(prompt.density)
    cache = programs.cache(prompt, PROMPT, 64)
    step = programs.step(cache, token, PROMPT, len(TEXT), "greedy", drawing)
    for number in TEXT[PROMPT:-1]:
        token = jax.device_put(np.array([number], np.int32), token.sharding)
        cache, token, found = step(cache, token)
        logits.append(np.asarray(found[0]))
    forced = engine.forced(TEXT[:PROMPT], TEXT[PROMPT:])
    assert forced.density == density
    log_probs = np.asarray(jax.nn.log_softmax(np.stack(logits), axis=-1))
    log_probs = log_probs[np.arange(NEW), TEXT[PROMPT:]]
    # New tokens attend to all, those of a given answer sparsely: only the first is alike.
    alike = slice(None) if pattern == Dense() else slice(1)
    np.testing.assert_allclose(log_probs[alike], forced.log_probs[alike], atol=0.05)
    assert log_probs.std() > 0.3
    assert density == 1 if pattern == Dense() else density < 0.8
