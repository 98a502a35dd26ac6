"""The section eval.data: what it takes over from data, and what is refused."""

import pytest

from mtraining_jax.config import (
    config_folder,
    config_from_dict,
    config_to_dict,
    config_to_toml,
    load_config,
)
from mtraining_jax.errors import UserError

TEXT = (("eval.every_steps", "20"), ("eval.data.source", "text"), ("eval.data.paths", "held/*.py"))


@pytest.fixture
def load(tmp_path):
    """Loads the configuration tiny, without its own section eval, with overrides."""
    path = tmp_path / "small.toml"
    head, _, rest = (config_folder() / "tiny.toml").read_text().partition("[eval]")
    path.write_text(head + rest[rest.index("[optimizer]") :])
    return lambda *overrides: load_config(path, overrides)


def refusal(load, *overrides):
    with pytest.raises(UserError) as caught:
        load(*overrides)
    return str(caught.value).removeprefix("command line: ")


def test_fields_that_are_not_given_are_those_of_training(load):
    data = load(*TEXT, ("data.eos", "7"), ("eval.data.batch_size", "3")).eval.data
    assert (data.source, data.paths, data.batch_size) == ("text", ("held/*.py",), 3)
    assert (data.eos, data.seq_len, data.tokenizer) == (7, 2048, "bytes")
    # Fields of the source belong to the source that is named with them.
    own = ("data.source", "jsonl"), ("data.paths", "train.jsonl"), ("data.text_field", "body")
    same = load(*own, ("eval.every_steps", "1"), ("eval.data.paths", "held.jsonl")).eval.data
    assert (same.source, same.paths, same.text_field) == ("jsonl", ("held.jsonl",), "body")
    assert load(*own, *TEXT).eval.data.text_field == "text"
    # A batch that is evaluated is not dealt to groups.
    assert load(*TEXT, ("data.balance", "length")).eval.data.balance == "none"


def test_what_is_printed_loads_back(load, tmp_path):
    config = load(*TEXT)
    path = tmp_path / "tiny.toml"
    path.write_text(config_to_toml(config))
    assert load_config(path) == config
    assert config_from_dict(config_to_dict(config), "a dict") == config


def test_what_cannot_be_evaluated_is_refused(load):
    on = TEXT[0]
    assert refusal(load, on) == (
        "eval.every_steps = 20 needs text that is not trained on, in eval.data: eval.data.paths or "
        "eval.data.source"
    )
    assert refusal(load, *TEXT, ("eval.data.balance", "density")) == (
        'eval.data.balance = "density" is not possible: evaluations take their batches in the '
        'order of the data; eval.data.balance = "none" would do'
    )
    assert refusal(load, on, ("eval.data.seed", "3")) == (
        'eval.data reads what data reads (source = "python_stdlib"), so nothing would be held out; '
        "set eval.data.paths or eval.data.source"
    )
    said = refusal(load, *TEXT, ("eval.data.seq_len", "1000"))
    assert said.startswith("eval.data.seq_len = 1000 is not a multiple of parallel.nodes * ")
    said = refusal(load, *TEXT, ("eval.data.seq_len", "4096"))
    assert said == "eval.data.seq_len = 4096 is more than model.max_position_embeddings = 2048"
    said = refusal(load, on, ("eval.data.source", "text"))
    assert said == 'eval.data.source = "text" needs eval.data.paths, the files to read'
    replayed = ("sparsity.kind", "replay"), ("sparsity.least_share", "0")
    said = refusal(load, *TEXT, *replayed, ("audit.every_steps", "0"))
    assert said.startswith('eval.attention = "same" computes the pairs that training would, and ')
    said = refusal(load, on, ("eval.data.source", "no:Such"))
    assert said.startswith('eval.data.source: "no:Such" cannot be loaded')
    assert load(("eval.data.paths", "x")).eval.every_steps == 0  # not on: not checked
