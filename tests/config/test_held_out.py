"""The section eval.data: its defaults and its errors."""

import pytest

from mtraining_jax.config import Config, config_folder
from mtraining_jax.data.sources.text import TextFiles

TEXT = (("eval.interval", "20"), ("eval.data.source", "text"), ("eval.data.paths", "held/*.py"))


@pytest.fixture
def load(tmp_path):
    """Loads the configuration tiny, without its section eval, with overrides."""
    path = tmp_path / "small.toml"
    head, _, rest = (config_folder() / "tiny.toml").read_text().partition("[eval]")
    path.write_text(head + rest[rest.index("[optimizer]") :])
    return lambda *overrides: Config.load(path, dict(overrides))


def test_unset_fields_default_to_training(load):
    data = load(*TEXT, ("data.eos", "7"), ("eval.data.batch_size", "3")).eval.data
    assert (data.source, data.source_options.paths, data.batch_size) == ("text", ("held/*.py",), 3)
    assert (data.eos, data.seq_len, data.tokenizer) == (7, 2048, "bytes")
    # Source-specific fields are inherited only if eval.data.source is not set.
    own = ("data.source", "jsonl"), ("data.paths", "train.jsonl"), ("data.text_field", "body")
    same = load(*own, ("eval.interval", "1"), ("eval.data.paths", "held.jsonl")).eval.data
    options = same.source_options
    assert (same.source, options.paths, options.text_field) == ("jsonl", ("held.jsonl",), "body")
    assert load(*own, *TEXT).eval.data.source_options == TextFiles(paths=("held/*.py",))
    # Validation batches are not balanced.
    assert load(*TEXT, ("data.balance", "length")).eval.data.balance == "none"


def test_printed_configuration_loads_back(load, tmp_path):
    config = load(*TEXT)
    path = tmp_path / "tiny.toml"
    path.write_text(config.to_toml())
    assert Config.load(path) == config
    assert Config.from_dict(config.to_dict(), "a dict") == config


def test_disabled_evaluations_are_not_validated(load):
    assert load(*TEXT[1:], ("eval.data.seq_len", "1000")).eval.interval == 0
