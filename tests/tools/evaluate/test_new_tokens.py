"""Answers with tokens that select what they attend to, on one device and on two."""

import functools

import jax
import numpy as np
import pytest

from mtraining_jax.tools.evaluate.engine import programs as engine_programs
from mtraining_jax.tools.evaluate.engine.decode import (
    make_decoding,
    make_step,
    renew_codes,
    renewals,
)
from mtraining_jax.tools.evaluate.engine.engine import Engine
from mtraining_jax.tools.evaluate.engine.options import GenerateOptions
from mtraining_jax.tools.evaluate.engine.programs import Programs, first_token
from mtraining_jax.utils.errors import UserError
from pallas_kernels.key_codes import KeyCodes
from tests.models.common import CHECKPOINTS

PROMPT, NEW = 390, 6
TEXT = np.random.default_rng(0).integers(0, 256, PROMPT + NEW).astype(np.int32)
ONE, TWO = (1, 1), (1, 2)
GREEDY = GenerateOptions()
SPARSE = {
    "block_size": 128, "probe_queries_per_block": 4, "sink_blocks": 0, "local_blocks": 1,
    "min_sparse_tokens": 0,
}  # fmt: skip


@functools.cache
def engine(mesh: tuple[int, int], tau: float, answers: str | None = None, **more) -> Engine:
    fields = {f"sparsity.{name}": x for name, x in (SPARSE | more | {"tau": tau}).items()}
    fields |= {"parallel.nodes": mesh[0], "parallel.devices_per_node": mesh[1]}
    folder = CHECKPOINTS / "llama3_tiny"
    return Engine.load(
        folder, attention="sparse", answers=answers, overrides=fields, tokenizer="bytes"
    )


def scores(*arguments, **more) -> np.ndarray:
    return engine(*arguments, **more).forced(TEXT[:PROMPT], TEXT[PROMPT:]).log_probs


def test_new_tokens_that_keep_all_mass_attend_densely():
    np.testing.assert_allclose(scores(TWO, 1.0), scores(TWO, 1.0, "dense"), atol=2e-5)
    few = {"min_sparse_tokens": PROMPT + NEW}  # fewer than the padded prompt has
    short, dense = scores(TWO, 0.3, **few), scores(TWO, 0.3, "dense", **few)
    np.testing.assert_allclose(short, dense, atol=2e-5)
    assert np.abs(dense - scores(TWO, 1.0)).max() > 1e-3
    # The second new token is the first that has as many tokens.
    some = np.abs(scores(TWO, 0.3, min_sparse_tokens=PROMPT + 2) - dense)
    assert some[:2].max() < 2e-5 and some[2] > 1e-3


def test_new_tokens_select_the_same_on_several_devices():
    one, two = scores(ONE, 0.3), scores(TWO, 0.3)
    np.testing.assert_allclose(one, two, atol=2e-5)
    # The first token of an answer comes from the prompt.
    assert one[0] == pytest.approx(scores(ONE, 0.3, "dense")[0], abs=1e-5)
    assert np.abs(one - scores(ONE, 0.3, "dense"))[1:].min() > 1e-3


def test_an_answer_is_scored_as_it_is_generated():
    found = engine(ONE, 0.3).generate(TEXT[:PROMPT], GenerateOptions(max_new_tokens=NEW))
    assert engine(ONE, 0.3).forced(TEXT[:PROMPT], found.tokens).is_argmax.all()
    dense = engine(ONE, 0.3, "dense").forced(TEXT[:PROMPT], found.tokens)
    assert not dense.is_argmax.all()


def check_range(codes: KeyCodes | None, keys: np.ndarray) -> None:
    assert codes is not None
    step = 2 * 2.6 * keys.std(0) / 15
    np.testing.assert_allclose(codes.unit[0, :, 0], step, rtol=1e-4)
    np.testing.assert_allclose(codes.middle[0, :, 0], keys.mean(0) + step / 2, atol=1e-5)


def test_codes_have_the_range_of_all_keys_when_they_were_made():
    model = engine(TWO, 0.3)
    network, programs = model.loaded.network, Programs(model.loaded)
    prompt = programs.prefill(TEXT[:PROMPT], PROMPT)()
    keys = np.asarray(prompt.keys, np.float64)[:, 0]
    layout = network.sequence_layout(keys.shape[1])
    keys = keys[:, layout.inverse()[:PROMPT]]
    token, none = first_token(prompt.logits, GREEDY), np.zeros((0, 1), np.int32)
    now = make_decoding(network, prompt, [PROMPT], token, none, NEW)
    for own, codes in zip(keys, now.cache.codes, strict=True):
        check_range(codes, own)
    # Four new tokens of other sizes, on the first rank.
    new = np.random.default_rng(0).normal(3, 9, (len(keys), 4, *keys.shape[2:]))
    place = slice(layout.seq_len // 2, layout.seq_len // 2 + 4)
    cached = tuple(
        x.at[0, :, place].set(own.swapaxes(0, 1))
        for x, own in zip(now.cache.keys, new, strict=True)
    )
    now = now._replace(cache=now.cache._replace(keys=cached, count=now.cache.count + 4))
    now = renew_codes(network, layout, np.array([False]), now)
    for own, codes in zip(keys, now.cache.codes, strict=True):
        check_range(codes, own)
    now = renew_codes(network, layout, np.array([True]), now)
    for own, codes in zip(np.concatenate([keys, new], 1), now.cache.codes, strict=True):
        check_range(codes, own)


def test_codes_are_renewed_when_a_sequence_has_doubled(monkeypatch):
    def steps(*arguments):
        return {number: x.tolist() for number, x in renewals(*arguments).items()}

    assert steps([3, 10], 20, 0) == {3: [True, False], 9: [True, False], 10: [False, True]}
    # Not before they are needed.
    expected = {8091: [True, False, False], 5000: [False, True, False]}
    assert steps([100, 5000, 9000], 9000, 8192) == expected
    calls, renew = [], engine_programs.renew_codes

    def renewed(network, layout, renewed_B, now):
        calls.append((renewed_B.tolist(), int(now.cache.count)))
        units = [np.asarray(now.cache.codes[0].unit)]  # they are donated
        now = renew(network, layout, renewed_B, now)
        units.append(np.asarray(now.cache.codes[0].unit))
        assert [not np.array_equal(*x) for x in zip(*units, strict=True)] == renewed_B.tolist()
        return now

    monkeypatch.setattr(engine_programs, "renew_codes", renewed)
    model = engine(ONE, 0.3)
    options = GenerateOptions(max_new_tokens=NEW)
    # Before the last step, and not after it.
    prompts = [TEXT[:2], TEXT[: NEW - 2], TEXT[: NEW - 1]]
    found = model.generate_many(prompts, options, [frozenset()] * 3)
    assert calls == [([True, False, False], 2), ([False, True, False], NEW - 2)]
    assert model.forced(TEXT[:2], found[0].tokens).is_argmax.all() and len(calls) == 3
    model.generate(TEXT[:100], options, stop_ids=frozenset())
    assert len(calls) == 3


def test_a_step_returns_everything_in_place():
    # On a GPU, steps with other addresses start 2 to 4 times as late.
    model = engine(ONE, 0.3)
    network, programs = model.loaded.network, Programs(model.loaded)
    prompt = programs.prefill(TEXT[:PROMPT], PROMPT)()
    layout = network.sequence_layout(prompt.keys.shape[2])
    token, none = first_token(prompt.logits, GREEDY), np.zeros((0, 1), np.int32)
    now = make_decoding(network, prompt, [PROMPT], token, none, NEW)
    how = jax.device_put((np.float32(1), np.float32(1), np.uint32(0)), network.replicated)
    step = make_step(network, layout, 1, "greedy")
    now = step(model.loaded.state, now, *how)  # which may copy arrays of the host
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(now)]
    now = step(model.loaded.state, now, *how)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(now)] == places
    assert int(now.cache.count) == 2 and int(now.scored.tokens[1, 0]) == int(now.token[0])


def test_what_follows_is_read_in_parts_of_some_steps(monkeypatch):
    monkeypatch.setattr(engine_programs, "steps_at_once", lambda network: 4)
    model = engine(ONE, 0.3)
    prompt = model.programs.prefill(TEXT[:PROMPT], PROMPT)()
    token, given = first_token(prompt.logits, GREEDY), TEXT[:7, None]
    parts = list(model.programs.decoder(prompt, token, given, PROMPT, 10, GREEDY, PROMPT))
    assert [len(x.tokens) for x in parts] == [4] * 3  # of 9 tokens after the first
    tokens = np.concatenate([x.tokens for x in parts])[:, 0]
    np.testing.assert_array_equal(tokens[:7], given[:, 0])
    is_argmax = np.concatenate([x.is_argmax for x in parts])
    assert is_argmax[7:].all() and not is_argmax[:7].all()


def test_answers_that_do_not_fit_are_refused():
    for attention, answers, fields, message in (
        ("sparse", "all", {}, '"all" must be one of "sparse", "dense", "one-pass"'),
        ("dense", "sparse", {}, 'answers = "sparse" needs sparse attention'),
        ("sparse", "sparse", {"sparsity.kind": "vertical_slash"}, 'kind = "vertical_slash"'),
        ("sparse", "sparse", {"sparsity.block_size": 64}, "block_size = 64: .* use \"dense\""),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            Engine.load(
                CHECKPOINTS / "llama3_tiny", attention=attention, answers=answers, overrides=fields
            )


def test_patterns_without_a_rule_answer_densely_and_say_so():
    loaded = engine(ONE, 0.3, block_size=64).loaded
    assert loaded.network.new_tokens is None
    assert "new tokens attend to all earlier ones" in loaded.note()
    selecting = engine(ONE, 0.3).loaded
    assert selecting.note() is None
    assert selecting.network.new_tokens.share == pytest.approx(3.5)


@pytest.mark.parametrize("mesh", [ONE, TWO])
def test_prompts_of_a_batch_are_answered_as_alone(mesh):
    model, seen = engine(mesh, 0.3), []
    prompts = [TEXT[:PROMPT], TEXT[5:392], TEXT[:388], TEXT[:100]]  # the last one is short
    assert model.programs.together(prompts, NEW) == [[0, 1, 2], [3]]
    options = GenerateOptions(max_new_tokens=NEW, temperature=0.3, seed=3)
    alone = [model.generate(prompt, options, stop_ids=frozenset()) for prompt in prompts]
    stops = [frozenset(), frozenset(alone[1].tokens[2:3]), frozenset(), frozenset()]
    found = model.generate_many(prompts, options, stops, on_result=lambda *x: seen.append(x))
    assert [x.tokens for x in found] == [
        alone[0].tokens, alone[1].tokens[: alone[1].tokens.index(alone[1].tokens[2])],
        alone[2].tokens, alone[3].tokens,
    ]  # fmt: skip
    assert [x.stopped for x in found] == ["length", "end", "length", "length"]
    assert seen == list(enumerate(found))
    np.testing.assert_allclose([x.density for x in found], [x.density for x in alone], rtol=1e-6)
    assert len({x.tokens for x in found}) == 4


def test_a_batch_is_no_larger_than_asked(monkeypatch):
    model, sizes = engine(ONE, 0.3), []
    whole = model._generate
    monkeypatch.setattr(
        model, "_generate", lambda ids, *x: sizes.append(len(ids)) or whole(ids, *x)
    )
    model.generate_many([TEXT[:100]] * 3, GenerateOptions(max_new_tokens=1), batch_size=2)
    assert sizes == [2, 1]
