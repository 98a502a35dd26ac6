"""What the benchmark of prefill and decoding counts and prints."""

import dataclasses

import numpy as np

from benchmarks.quality.evaluate import Timing, bytes_of_a_token, row_of
from mtraining_jax.config import Config
from mtraining_jax.models.spec import ModelSpec


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
