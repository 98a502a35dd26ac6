"""The section eval.data: what it takes over from data, and what is refused."""

import pytest

from mtraining_jax.config import config_from_dict, config_to_dict, config_to_toml, load_config
from mtraining_jax.errors import UserError

TEXT = (("eval.every_steps", "20"), ("eval.data.source", "text"), ("eval.data.paths", "held/*.py"))


def tiny(*overrides):
    return load_config("tiny", overrides)


def refusal(*overrides):
    with pytest.raises(UserError) as caught:
        tiny(*overrides)
    return str(caught.value)


def test_fields_that_are_not_given_are_those_of_training():
    data = tiny(*TEXT, ("data.eos", "7"), ("eval.data.batch_size", "3")).eval.data
    assert (data.source, data.paths, data.batch_size) == ("text", ("held/*.py",), 3)
    assert (data.eos, data.seq_len, data.tokenizer) == (7, 2048, "bytes")
    # Fields of the source belong to the source that is named with them.
    own = ("data.source", "jsonl"), ("data.paths", "train.jsonl"), ("data.text_field", "body")
    same = tiny(*own, ("eval.every_steps", "1"), ("eval.data.paths", "held.jsonl")).eval.data
    assert (same.source, same.paths, same.text_field) == ("jsonl", ("held.jsonl",), "body")
    assert tiny(*own, *TEXT).eval.data.text_field == "text"


def test_what_is_printed_loads_back(tmp_path):
    config = tiny(*TEXT)
    path = tmp_path / "tiny.toml"
    path.write_text(config_to_toml(config))
    assert load_config(path) == config
    assert config_from_dict(config_to_dict(config), "a dict") == config


def test_what_cannot_be_evaluated_is_refused():
    on = TEXT[0]
    assert refusal(on) == (
        "eval.every_steps = 20 needs text that is not trained on, in eval.data: eval.data.paths or "
        "eval.data.source"
    )
    assert refusal(on, ("eval.data.seed", "3")) == (
        'eval.data reads what data reads (source = "python_stdlib"), so nothing would be held out; '
        "set eval.data.paths or eval.data.source"
    )
    said = refusal(*TEXT, ("eval.data.seq_len", "1000"))
    assert said.startswith("eval.data.seq_len = 1000 is not a multiple of parallel.nodes * ")
    said = refusal(*TEXT, ("eval.data.seq_len", "4096"))
    assert said == "eval.data.seq_len = 4096 is more than model.max_position_embeddings = 2048"
    said = refusal(on, ("eval.data.source", "text"))
    assert said == 'eval.data.source = "text" needs eval.data.paths, the files to read'
    said = refusal(*TEXT, ("sparsity.kind", "replay"), ("metrics.recall_every", "0"))
    assert said.startswith('eval.attention = "same" computes the pairs that training would, and ')
    assert 'eval.data.source: "no:Such" cannot be' in refusal(on, ("eval.data.source", "no:Such"))
    assert tiny(("eval.data.paths", "x")).eval.every_steps == 0  # not on: not checked
