"""Patterns with special code paths, each in a training step on one device."""

import json

import numpy as np
import pytest

from mtraining_jax.cli.train import main
from mtraining_jax.config import config_to_toml
from tests.training.common import changed, written

HEADS = [["vertical_and_slash", 8, 16, 1.0], ["stream_llm", 4, 24, 1.0]]
OPTIONS = {
    "minference": ["budget_file={file}", "num_probe_queries=8"],
    "flex_prefill": ["gamma=0.5", "min_budget=8", "js_threshold=0.2"],
    "moba": ["chunk_size=16", "top_k=3"],
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_run_learns_with_it(kind, plain_config, tmp_path):
    config = changed(plain_config, run={"steps": 6})
    path, file = tmp_path / "config.toml", tmp_path / "budgets.json"
    file.write_text(json.dumps([HEADS, HEADS[::-1]]))
    path.write_text(config_to_toml(config))
    options = [f"--sparsity.{option.format(file=file)}" for option in OPTIONS[kind]]
    arguments = ["--config", str(path), f"--sparsity.kind={kind}", *options]
    assert main([*arguments, "--sparsity.block_size=8"]) == 0
    records = written(config)
    losses = [record["loss"] for record in records]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    assert 0 < records[0]["density"] < 0.9
