"""What the benchmark of prefill and decoding counts and prints."""

import dataclasses

import numpy as np
import pytest

import benchmarks.quality.evaluate
from benchmarks.quality.evaluate import Timing, bytes_of_a_token, row_of, time_pattern
from mtraining_jax.config import Config
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.tools.evaluate.engine import programs
from mtraining_jax.tools.evaluate.engine.engine import Engine
from tests.models.common import CHECKPOINTS


def test_a_token_reads_all_weights_and_the_devices_part_of_the_cache():
    spec = ModelSpec.from_config(Config.load("qwen3b_512k").model)
    sizes = {name: (int(np.prod(x.shape)), 2) for name, x in spec.parameters.items()}
    weights = 2 * sum(number for number, _ in sizes.values())
    # 4 L Hk D bytes a token: 36 layers, 2 heads of 128.
    assert bytes_of_a_token(spec, sizes, 131072, 1, 2) == weights + 36864 * 131072
    assert bytes_of_a_token(spec, sizes, 131072, 8, 2) == weights + 36864 * 131072 // 8
    assert 6.1e9 < weights < 6.2e9


def test_a_row_sets_times_against_what_is_possible():
    timing = Timing(density=0.063, forward=1.9, prefill=2.0, token=0.005, peak_bytes=2**30)
    row = row_of("replay", timing, 131072, 0.0025)
    assert row == [
        "replay", "0.063", "1.900", "2.000", "95.0%", "65,536", "5.00", "2.50", "2.00", "1.0",
    ]  # fmt: skip
    unknown = dataclasses.replace(timing, peak_bytes=None)
    assert row_of("replay", unknown, 131072, 0.0025)[-1] == "–"


@pytest.mark.parametrize("at_once", [1, 4])
def test_all_repeats_are_timed(at_once, monkeypatch):
    for place in (programs, benchmarks.quality.evaluate):
        monkeypatch.setattr(place, "steps_at_once", lambda network: at_once)
    fields = {"parallel.nodes": 1, "parallel.devices_per_node": 1}
    loaded = Engine.load(CHECKPOINTS / "llama3_tiny", overrides=fields, tokenizer="bytes").loaded
    timing = time_pattern(loaded, 40, 2, 3)
    assert timing.density == 1 and timing.token > 0
