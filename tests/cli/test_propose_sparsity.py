"""The command that proposes a sparse pattern, on a tiny model."""

import dataclasses
import json

import numpy as np
import pytest

from mtraining_jax.cli.propose_sparsity import config_with, forecast_seconds, main
from mtraining_jax.evaluation.proposal import Measured, proposed
from tests.models.common import CHECKPOINTS

MODEL = CHECKPOINTS / "llama3_tiny"
BLOCKS = "block_size=16,probe_queries_per_block=4,local_blocks=1"
ALL, FEW = (f"sampled_rows,tau={tau},{BLOCKS}" for tau in (1.0, 0.1))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A passage, other text, and the passage again: the second time it is a far copy."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("text")
    words = [bytes(rng.integers(97, 123, 150).tolist()).decode() for _ in range(8)]
    passage = words[0][:100]
    for i, word in enumerate(words):
        (folder / f"{i}.txt").write_text(passage + word + "\n" + word[::-1] + passage)
    return folder


def propose(text, *options):
    return main(
        [
            "--model",
            str(MODEL),
            "--text",
            str(text),
            "--tokenizer",
            "bytes",
            "--length",
            "512",
            "--parallel.devices_per_node=1",
            "--parallel.nodes=1",
            *options,
        ]
    )


def test_settings_are_measured_and_the_cheapest_that_loses_little_is_proposed(
    text, tmp_path, capsys
):
    out = tmp_path / "found.json"
    asked = ("--settings", ALL, FEW, "--sequences", "2", "--output", str(out))
    assert propose(text, *asked, "--most-rise=99", "--most-copies=99") == 0
    printed = capsys.readouterr().out
    assert "2 sequences of 512 tokens" in printed and "all pairs" not in printed
    assert '[sparsity]\nkind = "sampled_rows"\ntau = 0.1\nblock_size = 16\n' in printed
    found = json.loads(out.read_text())
    dense, everything, few = found["settings"]
    assert found["proposed"] == few["text"] == FEW
    assert (dense["text"], dense["density"], dense["rise"]) == ("dense", 1.0, 0.0)
    # Attention of random weights is uniform: every block has mass.
    assert everything["density"] == pytest.approx(1) and abs(everything["rise"]) < 1e-5
    assert few["density"] < 0.5 and abs(few["rise"]) > 1e-4 and few["error"] > 0
    assert abs(few["copies"]) > 1e-4 and few["copies"] != few["rise"]
    assert few["rise"] == pytest.approx(few["loss"] - dense["loss"])
    assert dense["step_seconds"] is None


def test_a_setting_must_be_within_both_limits():
    found = [
        Measured("few", 0.1, 2.0, 0.02, 0.001, 0.01),
        Measured("some", 0.2, 2.0, 0.0, 0.001, 0.09),
        Measured("many", 0.4, 2.0, 0.0, 0.001, None),
    ]
    timed = [dataclasses.replace(x, step_seconds=t) for x, t in zip(found, (3, 2, 1), strict=True)]

    def best(rise, copies, measured=found):
        one = proposed(measured, rise, copies)
        return one and one.text

    assert best(0.02, 0.01) == "few" and best(0.01, 0.1) == "some"
    assert best(0.01, 0.05) == "many"  # without far copies only the other limit applies
    assert best(-1, 1) is None
    assert best(1, 1, timed) == "many"


def test_what_cannot_be_measured_is_refused_in_a_sentence(text, tmp_path, capsys):
    for options, status, reason in (
        (("--length", "2048"), 2, "--length 2048 is more than the 512 pos"),
        (("--length", "500"), 2, "--length 500 would be padded to 512 with blocks of 16"),
        (("--settings", "sampled_rows,tua=0.9"), 2, '"tua=0.9" in "sampled_rows,tua=0.9" is no'),
        (("--settings", "replay"), 2, "which does not select pairs"),
        (("--config", "no_such_run"), 2, 'unknown configuration "no_such_run"'),
        (("--sequences", "0"), 2, "argument --sequences: 0 must be an integer of at least 1"),
        (("--sparsity.tau=1",), 2, "unknown option --sparsity.tau=1"),
        (("--text", str(tmp_path / "none")), 2, f'error: --text: "{tmp_path}/none" does not'),
        (("--output", str(tmp_path)), 2, "must be a file in an existing folder"),
    ):
        settings = () if "--settings" in options else ("--settings", ALL)
        assert propose(text, *settings, *options) == status
        assert reason in capsys.readouterr().err, options


def test_a_step_is_forecast_at_the_measured_density():
    config = config_with("qwen3b_512k", "sampled_rows,tau=0.8")
    assert config.sparsity.pattern.tau == 0.8
    few, many = forecast_seconds(config, 0.05), forecast_seconds(config, 0.5)
    dense = forecast_seconds(config_with("qwen3b_512k", "dense"), 1.0)
    assert 0 < few < many < dense
    # CPU rates are unknown.
    assert forecast_seconds(config_with("tiny", "dense"), 1.0) is None
