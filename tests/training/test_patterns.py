"""Patterns with special code paths, and a user-defined one that the command line selects."""

import json

import numpy as np
import pytest

from mtraining_jax.cli.train import main
from mtraining_jax.config import Config
from mtraining_jax.patterns.registry import PATTERNS
from tests.training.common import changed, written

pytestmark = pytest.mark.usefixtures("drawn_alone")

HEADS = [["vertical_and_slash", 8, 16, 1.0], ["stream_llm", 4, 24, 1.0]] * 3
OPTIONS = {
    "minference": ["budget_file={file}", "num_probe_queries=8"],
    "flex_prefill": ["gamma=0.5", "min_budget=8", "js_threshold=0.2"],
    "moba": ["chunk_size=16", "top_k=3"],
}
USER_PATTERN = "examples.strided_pattern:Strided"


@pytest.mark.parametrize(
    "kind",
    ["minference", *(pytest.param(x, marks=pytest.mark.slow) for x in ("flex_prefill", "moba"))],
)
def test_a_run_learns_with_it(kind, plain_config, tmp_path):
    config = changed(plain_config, run={"steps": 6})
    path, file = tmp_path / "config.toml", tmp_path / "budgets.json"
    file.write_text(json.dumps([HEADS, HEADS[::-1]]))
    path.write_text(config.to_toml())
    options = [f"--sparsity.{option.format(file=file)}" for option in OPTIONS[kind]]
    arguments = ["--config", str(path), f"--sparsity.kind={kind}", *options]
    assert main([*arguments, "--sparsity.block_size=8"]) == 0
    records = written(config)
    losses = [record["loss"] for record in records]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    assert 0 < records[0]["density"] < 0.9


def test_a_user_pattern_trains_over_a_ring_by_its_place_and_its_options(
    plain_config, tmp_path, capsys
):
    config = changed(
        plain_config, run={"steps": 2}, parallel={"devices_per_node": 2, "ring": "flat"}
    )
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml())
    options = [f"--sparsity.kind={USER_PATTERN}", "--sparsity.stride=3", "--sparsity.window=2"]
    assert main(["--config", str(path), *options]) == 0
    records = written(config)
    assert len(records) == 2 and all(np.isfinite(record["loss"]) for record in records)
    blocks = config.data.seq_len // config.sparsity.block_size
    rows = np.arange(blocks)
    seen = (rows[:, None] - rows < 2) | (rows % 3 == 0)
    tiles, size = np.tril(seen, -1).sum(), config.sparsity.block_size
    pairs = tiles * size**2 + blocks * size * (size + 1) // 2
    share = pairs / (config.data.seq_len * (config.data.seq_len + 1) // 2)
    assert records[0]["density"] == pytest.approx(share)
    assert "a window of 2 blocks and one block in 3 before it" in capsys.readouterr().out


def test_fields_of_a_user_pattern_are_written_only_where_it_is_selected(plain_config):
    PATTERNS.get(USER_PATTERN)
    own = Config.from_dict({**plain_config.to_dict(), "sparsity": {"kind": USER_PATTERN}}, "a test")
    assert own.to_dict()["sparsity"]["window"] == 2
    other = changed(own, sparsity={"kind": "dense"})
    assert "window" not in other.to_dict()["sparsity"]
    assert "\nwindow = " not in other.to_toml()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["kind=" + USER_PATTERN, "strid=3"], "sparsity.strid is not a field; did you mean spar"),
        (["kind=" + USER_PATTERN, "stride=0"], "stride = 0 is not allowed: it must be an integer"),
        (
            ["kind=examples.nothing:Strided"],
            'error: command line: sparsity.kind: "examples.nothing:Strided" cannot be loaded as a '
            "sparse pattern: No module named 'examples.nothing'",
        ),
    ],
)
def test_options_of_a_user_pattern_are_checked_as_others_are(
    plain_config, tmp_path, capsys, options, sentence
):
    path = tmp_path / "config.toml"
    path.write_text(plain_config.to_toml())
    assert main(["--config", str(path), *(f"--sparsity.{option}" for option in options)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
