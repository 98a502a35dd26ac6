"""Models of this package in lm-evaluation-harness, compared with its Hugging Face class."""

import importlib
import json
import runpy
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from mtraining_jax.data.tokenizer import make_tokenizer
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from mtraining_jax.tools.evaluate.model import Forced
from mtraining_jax.utils.errors import UserError
from tests.data.tokenizer_folders import write_tokenizer
from tests.tools.evaluate import harness_tasks

try:
    from mtraining_jax.tools.evaluate.lm_eval import HarnessModel, generate_options
except ImportError as error:
    HarnessModel, generate_options, MISSING = None, None, str(error)
else:
    MISSING = ""
needs_harness = pytest.mark.skipif(bool(MISSING), reason="lm-evaluation-harness is not installed")


@pytest.mark.skipif(not MISSING, reason="lm-evaluation-harness is installed")
def test_without_the_harness_the_error_says_what_to_install():
    assert "install the extra eval" in MISSING


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = harness_tasks.prepare(tmp_path_factory.mktemp("harness"))
    return HarnessModel(
        path=str(folder), dtype="float32", batch_size=1, **{"parallel.devices_per_node": 1}
    )


@needs_harness
@pytest.mark.filterwarnings("default")
def test_answers_are_those_of_the_harness_for_hugging_face(model, tmp_path):
    expected = json.loads(Path(__file__).with_name("harness_hf.json").read_text())["answers"]
    found = harness_tasks.answers(model, tmp_path)
    assert found.keys() == expected.keys()
    for name, samples in expected.items():
        for ours, theirs in zip(found[name], samples, strict=True):
            if name == "tiny_choice":
                assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
                ours, theirs = ([x for x, _ in answers] for answers in (ours, theirs))
            if name == "tiny_generation":
                assert ours == theirs
            else:
                np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-4, err_msg=name)


@needs_harness
def test_a_text_that_is_too_long_is_an_error(model):
    class Request:
        args = ("a" * 600, {"until": [], "max_gen_toks": 8})

    with pytest.raises(UserError, match="600 tokens and 8 new ones are more than the 512"):
        model.generate_until([Request()])
    with pytest.raises(UserError, match="more than the 512 positions"):
        model._loglikelihood_tokens([(None, [1] * 600, [2])])


@needs_harness
def test_unsupported_arguments_and_settings_are_refused(model):
    with pytest.raises(UserError, match="path is missing"):
        HarnessModel()
    with pytest.raises(UserError, match="unknown model argument peft"):
        HarnessModel(engine=model.engine, peft="x")
    with pytest.raises(UserError, match="generation_kwargs: num_beams = 4 is not supported"):
        generate_options({"until": ["a"], "num_beams": 4})
    options = generate_options({"until": "x", "do_sample": True, "max_new_tokens": 3})
    assert (options.stop, options.temperature, options.max_new_tokens) == (("x",), 1.0, 3)
    assert generate_options({"temperature": 0.0}).kind == "greedy"


@needs_harness
@pytest.mark.filterwarnings("default")
def test_responses_of_another_model_are_not_used(model, tmp_path):
    from lm_eval.api.model import CachingLM

    CachingLM(model, str(tmp_path / "db")).dbdict.close()
    CachingLM(model, str(tmp_path / "db")).dbdict.close()
    other = HarnessModel(engine=model.engine.with_pattern(VerticalSlash()))
    with pytest.raises(UserError, match="db has responses of another model; give each model"):
        CachingLM(other, str(tmp_path / "db"))


@pytest.fixture
def calls(monkeypatch):
    """Imitates the harness; returns its calls. Modules that import it must be imported again."""
    calls = []

    def windows(tokens, prefix_token, max_seq_len, context_len):
        assert max_seq_len == 512 and context_len == 1
        return [([prefix_token, *tokens[:-1]], tokens)]

    def register_model(name):
        return lambda cls: calls.append(f"{name} is {cls.__name__}") or cls

    parts = {
        "__main__": {"cli_evaluate": lambda: calls.append("evaluated")},
        "utils": {"get_rolling_token_windows": windows, "make_disjoint_window": lambda x: x},
        "api": {},
        "api.model": {"TemplateLM": object},
        "api.registry": {"register_model": register_model},
        "models": {},
        "models.utils": {"handle_stop_sequences": None, "normalize_gen_kwargs": None},
    }
    monkeypatch.setitem(sys.modules, "lm_eval", types.ModuleType("lm_eval"))
    for name, members in parts.items():
        module = types.ModuleType(f"lm_eval.{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(sys.modules["lm_eval"], name, module, raising=False)
    tqdm = types.SimpleNamespace(tqdm=lambda items, **_: items)
    monkeypatch.setitem(sys.modules, "tqdm", tqdm)
    monkeypatch.delitem(sys.modules, "mtraining_jax.tools.evaluate.lm_eval", raising=False)
    return calls


def test_the_command_is_that_of_the_harness_with_another_model(calls):
    runpy.run_module("mtraining_jax.tools.evaluate.lm_eval", run_name="__main__")
    assert calls == ["mtraining_jax is HarnessModel", "evaluated"]


@pytest.mark.parametrize(
    "kind, bos, prefix, text",
    [("llama3", None, 262, [262, 256]), ("llama3", False, 263, [256]), ("gpt2", None, 262, [256])],
)
@pytest.mark.usefixtures("calls")
def test_a_text_begins_once_as_in_training(tmp_path, monkeypatch, kind, bos, prefix, text):
    module = importlib.import_module("mtraining_jax.tools.evaluate.lm_eval")
    monkeypatch.delitem(sys.modules, "mtraining_jax.tools.evaluate.lm_eval")

    asked = []

    def forced(context, continuation):
        asked.append([*context, *continuation])
        return Forced(np.zeros(len(continuation)), np.ones(len(continuation), bool), 1.0)

    name = write_tokenizer(tmp_path, kind)
    loaded = types.SimpleNamespace(needed_tokenizer=lambda: make_tokenizer(name, bos=bos))
    engine = types.SimpleNamespace(loaded=loaded, max_positions=512, forced=forced)
    found = module.HarnessModel(engine=engine)
    assert found.tok_encode("he") == text
    assert found.tok_encode("he", add_special_tokens=False) == [256]
    if text[0] == 262:
        assert found.tok_encode("<|begin_of_text|>he") == text
    found.cache_hook = types.SimpleNamespace(add_partial=lambda *_: None)
    found.loglikelihood_rolling([types.SimpleNamespace(args=("he",))])
    assert asked == [[prefix, 256]]
