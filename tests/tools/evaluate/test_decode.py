"""Prefill and token-by-token decoding, compared with a plain model that reads all tokens at once.

All tests share one model and one text, on one device and on eight.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.models.huggingface.config import read_hf_config
from mtraining_jax.models.huggingface.read import load_hf
from mtraining_jax.models.transformer import graph_definition
from mtraining_jax.tools.evaluate.engine import programs as engine_programs
from mtraining_jax.tools.evaluate.engine.decode import ScoredTokens, room_for
from mtraining_jax.tools.evaluate.engine.engine import Engine
from mtraining_jax.tools.evaluate.engine.options import GenerateOptions
from mtraining_jax.utils.errors import UserError
from tests.models.common import CHECKPOINTS, forward

# The prompt ends inside a block on every mesh.
PROMPT, NEW = 75, 8
TEXT = np.random.default_rng(0).integers(0, 256, PROMPT + NEW).astype(np.int32)
SPARSE = {
    "block_size": 8,
    "probe_queries_per_block": 4,
    "tau": 0.5,
    "local_blocks": 1,
    "dense_suffix_tokens": 0,
}
ONE, EIGHT = (1, 1), (2, 4)
LLAMA, PHI, GEMMA = "llama3_tiny", "phi3_tiny_longrope", "gemma3_tiny"
GPT_OSS = "gpt_oss_tiny"
GREEDY = GenerateOptions()


@functools.cache
def engine(mesh: tuple[int, int], attention: str = "dense", name: str = LLAMA, **more) -> Engine:
    """On eight devices matrices are sharded, so each step has to gather them."""
    fields = {f"sparsity.{name}": value for name, value in (SPARSE | more).items()}
    fields |= {"parallel.nodes": mesh[0], "parallel.devices_per_node": mesh[1]}
    fields |= {"parallel.fsdp": mesh == EIGHT}
    folder = CHECKPOINTS / name
    tokenizer = None if name == GEMMA else "bytes"  # it has only 256 ids
    return Engine.load(folder, attention=attention, overrides=fields, tokenizer=tokenizer)


@functools.cache
def plain_logits(name: str = LLAMA, length: int = len(TEXT)) -> np.ndarray:
    """fp32 [n, V] of the text, from the plain model."""
    spec = read_hf_config(CHECKPOINTS / name, dtype="float32", remat="none")
    state = load_hf(CHECKPOINTS / name, spec)
    tokens = jnp.asarray(TEXT[:length], jnp.int32)[None]
    positions = jnp.arange(length, dtype=jnp.int32)
    return np.asarray(forward(graph_definition(spec), state, tokens, positions)[1][0])


# Phi-3 has other rotary factors beyond 64 tokens of the text; its padding to 80 does not count.
# Gemma 3 and gpt-oss have layers with windows of 64 tokens, gpt-oss has sinks.
@pytest.mark.parametrize(
    ("name", "mesh", "block_size", "prompt_len"),
    [(GPT_OSS, EIGHT, 8, PROMPT), (PHI, ONE, 40, 52), (GEMMA, ONE, 8, PROMPT)],
)
def test_scores_are_those_of_reading_all_at_once(name, mesh, block_size, prompt_len):
    programs, total = engine(mesh, name=name, block_size=block_size).programs, prompt_len + NEW
    prompt = programs.prefill(TEXT[:prompt_len], total)()
    logits = plain_logits(name, total)
    np.testing.assert_allclose(prompt.logits[0], logits[prompt_len - 1], atol=2e-5, rtol=1e-4)
    token = jax.device_put(TEXT[[prompt_len]], prompt.density.sharding)
    given = TEXT[prompt_len + 1 : total, None]  # then one token is sampled
    parts = programs.decoder(prompt, token, given, prompt_len, NEW + 1, GREEDY, total)
    found = ScoredTokens(*map(np.concatenate, zip(*parts, strict=True)))
    expected = np.append(TEXT[prompt_len + 1 : total], logits[-1].argmax())
    np.testing.assert_array_equal(found.tokens[:, 0], expected)
    log_probs = np.asarray(jax.nn.log_softmax(logits[prompt_len:], axis=-1))
    own = log_probs[np.arange(NEW), expected]
    np.testing.assert_allclose(found.log_probs[:, 0], own, atol=3e-5, rtol=1e-4)
    np.testing.assert_array_equal(found.is_argmax[:, 0], expected == log_probs.argmax(-1))
    assert np.ptp(own) > 1 and found.is_argmax.sum() < NEW


# Greedy tokens of transformers 5.24.0 after the first 52 and 64 tokens of the text. It rotates by
# the tokens so far: beyond 64 of them the whole cache is computed again, with the long factors.
BEFORE_64 = [186, 112, 103, 25, 197, 224, 245, 67, 127, 188, 86, 189, 2]
TOKENS = {
    52: [*BEFORE_64, 212, 181, 218, 220, 54, 221, 99, 10, 127, 169, 193],
    64: [218, 48, 217, 218, 156, 166, 248, 162, 283, 25, 91, 99, 10, 127, 113, 141],
}


@functools.cache
def dense_phi() -> Engine:
    """It shares programs with the sparse one."""
    return engine(ONE, "sparse", PHI).dense()


@pytest.fixture(params=[1, 8])
def at_once(request, monkeypatch):
    """As on a CPU, and as on a GPU."""
    monkeypatch.setattr(engine_programs, "steps_at_once", lambda network: request.param)


@pytest.mark.usefixtures("at_once")
def test_longrope_follows_the_tokens_so_far_and_not_the_largest_number_of_new_ones():
    for prompt_len, expected in TOKENS.items():
        for count in (len(expected), 5, 13, 1):
            options = GenerateOptions(max_new_tokens=count)
            found = dense_phi().generate(TEXT[:prompt_len], options, stop_ids=frozenset())
            assert list(found.tokens) == expected[:count]
    # The last token of an answer is not read, so that this pass is one of 64 tokens.
    assert dense_phi().forced(TEXT[:52], BEFORE_64).is_argmax.all()


def test_a_prompt_before_which_longrope_changes_is_decoded_alone():
    model = engine(ONE, name=PHI, block_size=40)
    prompts = [TEXT[:70], TEXT[:64], TEXT[:75]]
    assert model.programs.together(prompts, 5) == [[0, 2], [1]]
    found = model.generate_many(prompts, GenerateOptions(max_new_tokens=5), [frozenset()] * 3)
    assert list(found[1].tokens) == TOKENS[64][:5]
    # The last new token is not read.
    assert model.programs.together([TEXT[:60], TEXT[:59]], 5) == [[0, 1]]
    assert model.programs.together([TEXT[:60], TEXT[:59]], 6) == [[0], [1]]


def test_a_sparse_prompt_is_read_again_where_longrope_changes():
    model = engine(ONE, "sparse", PHI)
    options = GenerateOptions(max_new_tokens=24)
    found = model.generate(TEXT[:52], options, stop_ids=frozenset())
    assert found.density < 1
    # A given answer is rotated by the length of the pass over it and its prompt.
    assert model.forced(TEXT[:52], found.tokens[:13]).is_argmax.all()
    after = model.forced(TEXT[:52], found.tokens).is_argmax
    assert after[13:].all() and not after[:13].all()


def test_a_model_of_nan_says_so_instead_of_tokens_and_scores(monkeypatch):
    model = dense_phi()
    broken = jax.tree.map(lambda x: x * jnp.nan, model.loaded.state)
    monkeypatch.setattr(model.programs, "_state", broken)  # with the programs compiled above
    for call, tokens in (
        (lambda: model.generate(TEXT[:52], GenerateOptions(max_new_tokens=1)), 52),
        (lambda: model.forced(TEXT[:52], TEXT[52:65]), 65),
        (lambda: model.token_losses(TEXT[:65]), 65),
    ):
        with pytest.raises(UserError, match=f"NaN or infinite within the first {tokens} tokens"):
            call()


def test_the_room_for_new_tokens_takes_whole_blocks():
    assert [room_for(n, 80) for n in (1, 128, 129, 200)] == [128, 128, 256, 256]
    for local in (131072, 98304, 65536):
        for new_tokens in (1, 300, 513):
            room = room_for(new_tokens, local)
            assert room >= new_tokens and (local + room) % 512 == 0
    assert room_for(1, 131072) == 512 and room_for(1, 16384) == 256


def test_losses_are_those_of_the_plain_model():
    log_probs = np.asarray(jax.nn.log_softmax(plain_logits(), axis=-1))
    expected = log_probs[np.arange(len(TEXT) - 1), TEXT[1:]]
    losses = engine(EIGHT).token_losses(TEXT)
    assert losses.dtype == np.float32
    np.testing.assert_allclose(losses, -expected, atol=2e-5, rtol=1e-4)
    forced = engine(EIGHT).forced(TEXT[:PROMPT], TEXT[PROMPT:])
    np.testing.assert_allclose(forced.log_probs, expected[PROMPT - 1 :], atol=2e-5, rtol=1e-4)
    best = log_probs.argmax(-1)[PROMPT - 1 : -1]
    np.testing.assert_array_equal(forced.is_argmax, best == TEXT[PROMPT:])


def test_a_sparse_pattern_reads_a_padded_prompt_the_same_on_one_device_and_on_eight():
    one, eight = (engine(mesh, "sparse").token_losses(TEXT) for mesh in (ONE, EIGHT))
    np.testing.assert_allclose(one, eight, atol=2e-5, rtol=1e-4)
    dense = engine(EIGHT).token_losses(TEXT)
    np.testing.assert_allclose(one[:7], dense[:7], atol=2e-5)  # a block attends to itself
    assert np.abs(one - dense).max() > 0.01


@pytest.mark.usefixtures("at_once")
def test_greedy_tokens_are_the_most_likely_ones_and_stop_where_asked():
    said = []
    found = engine(EIGHT).generate(TEXT[:PROMPT], GenerateOptions(max_new_tokens=NEW), said.append)
    assert len(found.tokens) == NEW and found.stopped == "length"
    assert "".join(said) == found.text
    assert found.prefill_seconds > 0 and found.decode_seconds > 0
    forced = engine(EIGHT).forced(TEXT[:PROMPT], found.tokens)
    assert forced.is_argmax.all() and forced.density == found.density == 1

    stop = found.text[3:5]
    ended = engine(EIGHT).generate(TEXT[:PROMPT], GenerateOptions(NEW, stop=(stop,)))
    assert ended.stopped == "stop" and ended.text == found.text[: found.text.find(stop)]
    assert found.tokens[: len(ended.tokens)] == ended.tokens


def test_an_answer_after_a_sparse_prompt_is_scored_as_it_would_be_generated():
    model = engine(EIGHT, "sparse")
    found = model.generate(TEXT[:PROMPT], GenerateOptions(max_new_tokens=NEW))
    forced = model.forced(TEXT[:PROMPT], found.tokens)
    assert forced.is_argmax.all() and forced.density == found.density < 1
    # Prompt and answer in one sparse pass: rows of the answer would miss most of the prompt.
    given = model.forced(TEXT[:PROMPT], TEXT[PROMPT:])
    losses = model.token_losses(TEXT)[PROMPT - 1 :]
    assert np.abs(given.log_probs + losses).max() > 0.001
    dense = engine(EIGHT).forced(TEXT[:PROMPT], TEXT[PROMPT:])
    network = dataclasses.replace(model.loaded.network, answers="one-pass")
    whole = Engine(dataclasses.replace(model.loaded, network=network), like=model)
    at_once = whole.forced(TEXT[:PROMPT], TEXT[PROMPT:])
    np.testing.assert_allclose(at_once.log_probs, -losses, atol=1e-6)
    assert np.abs(given.log_probs - dense.log_probs).max() > 0.001


def test_the_end_of_a_prompt_sees_all_of_it_unless_the_settings_say_otherwise():
    without = engine(EIGHT, "sparse")
    settings = dataclasses.replace(without.loaded.network.settings, dense_suffix_tokens=None)
    model = without.with_pattern(settings)
    # The prompt is shorter than its dense suffix.
    found, dense = (x.forced(TEXT[:PROMPT], TEXT[PROMPT:]) for x in (model, engine(EIGHT)))
    np.testing.assert_allclose(found.log_probs, dense.log_probs, atol=2e-5, rtol=1e-4)
    sparse = without.forced(TEXT[:PROMPT], TEXT[PROMPT:])
    assert sparse.density < found.density
    assert np.abs(found.log_probs - sparse.log_probs).max() > 0.001
    # Sequences other than prompts are read as in training.
    np.testing.assert_array_equal(model.token_losses(TEXT), without.token_losses(TEXT))


def test_invalid_tokens_are_reported():
    model = engine(ONE, "sparse")
    for call, message in [
        (lambda: model.token_losses([3]), "at least 2 token ids"),
        (lambda: model.token_losses([3, 288]), "from 0 to 287"),
        (lambda: model.token_losses(np.zeros(514, int)), "513 tokens are more than the 512"),
        (
            lambda: model.generate(np.zeros(400, int), GenerateOptions(200)),
            "400 tokens and 200 new ones are more than the 512 positions",
        ),
        (lambda: model.forced(TEXT, []), "at least 1 token id"),
        (lambda: model.generate("text"), r"have shape \[\]; expected a list of .* 1 token id"),
    ]:
        with pytest.raises(UserError, match=message):
            call()
    for overrides in ([("sparsity.tau", "0.5")], "sparsity.tau=0.5"):
        with pytest.raises(UserError, match="^overrides=.* must be a dict of values by field"):
            Engine.load("tests/checkpoints/qwen2_tiny", overrides=overrides)
