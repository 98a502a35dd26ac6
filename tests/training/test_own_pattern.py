"""A user-defined pattern in the trainer, selected on the command line."""

import numpy as np
import pytest

from mtraining_jax.cli.train import main
from mtraining_jax.config import config_from_dict, config_to_dict, config_to_toml
from mtraining_jax.patterns.registry import PATTERNS
from tests.training.common import changed, written

pytestmark = pytest.mark.usefixtures("drawn_alone")

KIND = "examples.strided_pattern:Strided"


def test_it_trains_over_a_ring_by_its_place_and_its_options(plain_config, tmp_path, capsys):
    config = changed(
        plain_config, run={"steps": 2}, parallel={"devices_per_node": 2, "ring": "flat"}
    )
    path = tmp_path / "config.toml"
    path.write_text(config_to_toml(config))
    options = [f"--sparsity.kind={KIND}", "--sparsity.stride=3", "--sparsity.window=2"]
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


def test_its_fields_are_written_only_where_it_is_selected(plain_config):
    PATTERNS.get(KIND)
    own = config_from_dict({**config_to_dict(plain_config), "sparsity": {"kind": KIND}}, "a test")
    assert config_to_dict(own)["sparsity"]["window"] == 2
    other = changed(own, sparsity={"kind": "dense"})
    assert "window" not in config_to_dict(other)["sparsity"]
    assert "\nwindow = " not in config_to_toml(other)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--sparsity.strid=3", "sparsity.strid is not a field; did you mean sparsity.stride?"),
        ("--sparsity.stride=0", "sparsity.stride = 0 is not allowed: it must be an integer"),
    ],
)
def test_its_options_are_checked_as_others_are(plain_config, tmp_path, capsys, option, sentence):
    path = tmp_path / "config.toml"
    path.write_text(config_to_toml(plain_config))
    assert main(["--config", str(path), f"--sparsity.kind={KIND}", option]) == 2
    assert sentence in capsys.readouterr().err


def test_a_pattern_that_cannot_be_loaded_is_reported(plain_config, tmp_path, capsys):
    path = tmp_path / "config.toml"
    path.write_text(config_to_toml(plain_config))
    assert main(["--config", str(path), "--sparsity.kind=examples.nothing:Strided"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        'error: command line: sparsity.kind: "examples.nothing:Strided" cannot be loaded as a '
        "sparse pattern: No module named 'examples.nothing'"
    )
