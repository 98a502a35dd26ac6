"""The section eval.data: its defaults and its errors."""

import pytest

from mtraining_jax.config import (
    config_folder,
    config_from_dict,
    config_to_dict,
    config_to_toml,
    load_config,
)
from mtraining_jax.data.sources.text import TextFiles
from mtraining_jax.utils.errors import UserError

TEXT = (("eval.interval", "20"), ("eval.data.source", "text"), ("eval.data.paths", "held/*.py"))


@pytest.fixture
def load(tmp_path):
    """Loads the configuration tiny, without its section eval, with overrides."""
    path = tmp_path / "small.toml"
    head, _, rest = (config_folder() / "tiny.toml").read_text().partition("[eval]")
    path.write_text(head + rest[rest.index("[optimizer]") :])
    return lambda *overrides: load_config(path, overrides)


def error_of(load, *overrides):
    with pytest.raises(UserError) as caught:
        load(*overrides)
    return str(caught.value).removeprefix("command line: ")


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
    path.write_text(config_to_toml(config))
    assert load_config(path) == config
    assert config_from_dict(config_to_dict(config), "a dict") == config


def test_inherited_problems_are_reported_once(load):
    own = TEXT[0], ("eval.data.paths", "held/*.py"), ("data.source", "text"), ("data.paths", "x")
    assert error_of(load, *own, ("data.eos", "-1")) == (
        "data.eos = -1 is not allowed: it must be an integer (at least 0) or a non-empty string or "
        "none"
    )
    assert len(error_of(load, *own, ("data.shufle", "1")).splitlines()) == 1
    lines = error_of(load, *own, ("data.seq_len", "1000")).splitlines()
    assert [line.split(" = ")[0] for line in lines] == ["data.seq_len"]


def test_invalid_evaluations(load):
    on = TEXT[0]
    assert error_of(load, on) == (
        "eval.interval = 20 needs validation data; set eval.data.paths or eval.data.source"
    )
    assert error_of(load, *TEXT, ("eval.data.balance", "density")) == (
        'eval.data.balance = "density" is not possible: evaluations read their batches in the '
        'order of the data; set eval.data.balance = "none"'
    )
    assert error_of(load, on, ("eval.data.seed", "3")) == (
        'eval.data reads the training data (source = "python_stdlib"); set eval.data.paths or '
        "eval.data.source to validation data"
    )
    error = error_of(load, *TEXT, ("eval.data.seq_len", "1000"))
    assert error.startswith("eval.data.seq_len = 1000 is not a multiple of parallel.nodes * ")
    error = error_of(load, *TEXT, ("eval.data.seq_len", "4096"))
    assert error == "eval.data.seq_len = 4096 is more than model.max_position_embeddings = 2048"
    error = error_of(load, on, ("eval.data.source", "text"))
    assert error == 'eval.data.source = "text" needs eval.data.paths, the files to read'
    small = ("sparsity.num_probe_queries", "32"), ("sparsity.min_block_mass", "0")
    replayed = ("sparsity.kind", "replay"), *small
    error = error_of(load, *TEXT, *replayed, ("audit.interval", "0"))
    assert error.startswith('eval.attention = "same" needs a pattern that selects pairs, and ')
    error = error_of(load, on, ("eval.data.source", "no:Such"))
    assert error.startswith('eval.data.source: "no:Such" cannot be loaded')
    disabled = load(*TEXT[1:], ("eval.data.seq_len", "1000"))  # so not validated
    assert disabled.eval.interval == 0
