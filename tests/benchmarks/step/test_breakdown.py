"""What the benchmark of a training step times, counts and prints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.step.breakdown import rows_of, stand_in, time_step
from benchmarks.step.compiled_step import Steps
from mtraining_jax.config import load_config
from mtraining_jax.training.build import build_mesh

GIB = 2**30


def timed(seconds, peak_bytes, density=None, executed=None):
    return Steps([], [], density, executed, seconds, 1.0, peak_bytes)


def test_the_stand_in_passes_gradients_to_all_inputs():
    q, k, v = (jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, h, 4))) for h in (4, 2, 2))

    def total(q, k, v):
        out, _ = stand_in(q, k, v)
        return jnp.sum(out * jnp.arange(4.0)[:, None])

    gradients = jax.jit(jax.grad(total, (0, 1, 2)))(q, k, v)
    np.testing.assert_allclose(gradients[0][0, 0, :, 0], [0, 1, 2, 3])
    for of_keys in gradients[1:]:
        np.testing.assert_allclose(of_keys[0, 0, :, 0], [0 + 1, 2 + 3])
    out, _ = jax.jit(stand_in)(q, k, v)
    np.testing.assert_allclose(out[0, :, 3], q[0, :, 3] + k[0, :, 1] + v[0, :, 1], rtol=1e-6)


def test_steps_without_attention_are_timed():
    tiny = {
        "parallel.cpu_devices": 8, "parallel.nodes": 1, "parallel.devices_per_node": 2,
        "data.seq_len": 128, "model.num_layers": 1, "model.intermediate_size": 64,
    }  # fmt: skip
    config = load_config("tiny", [(field, str(value)) for field, value in tiny.items()])
    timing = time_step(config, build_mesh(config), with_attention=False, steps=1)
    assert timing.seconds > 0 and timing.compile_seconds > 0 and timing.peak_bytes > 0
    assert timing.density is None and timing.executed is None


@pytest.mark.parametrize("kind, share", [("NVIDIA H200", "33.3%"), ("cpu", "–")])
def test_two_depths_give_the_time_of_the_whole_depth(kind, share):
    config = load_config("qwen3b_512k", [])
    layer, head = 2048 * (2 * 2048 + 2 * 256 + 3 * 11008), 2048 * 151936
    # One device's share of the FLOP at a third of 989.4 TFLOP/s, and attention in a third of it.
    unit = 6 * 524288 / 8 * 3 / 989.4e12
    outside = {depth: unit * (depth * layer + head) for depth in (2, 6, 36)}
    timings = {
        (depth, part): timed(outside[depth] * (1 + part / 3), depth * GIB, *(
            (0.06, 0.07) if part else ()
        ))
        for depth in (2, 6) for part in (False, True)
    }  # fmt: skip
    rows = list(rows_of(config, [2, 6], timings, kind))
    assert [row[0] for row in rows] == ["2", "6", "36 (from 2 and 6)"]
    assert [row[4] for row in rows] == [share] * 3
    assert [row[10] for row in rows] == ["2.0", "6.0", "–"]
    np.testing.assert_allclose(float(rows[2][2]), outside[36], rtol=1e-3)
    np.testing.assert_allclose(float(rows[2][1]), outside[36] * 4 / 3, rtol=1e-3)
    # 14 D a pair and head, 7 % of them, on 8 devices, in a third of the time of the rest.
    pairs = 524288 * 524289 / 2
    rate = 36 * 16 * 14 * 128 * pairs * 0.07 / 8 / (outside[36] / 3)
    np.testing.assert_allclose(float(rows[2][6]), rate / 1e12, atol=1.0)
    assert rows[2][8] == f"{524288 / (outside[36] * 4 / 3):,.0f}"


def test_without_attention_the_rest_is_all_there_is():
    config = load_config("qwen3b_512k", [])
    timings = {(2, False): timed(1.0, GIB)}
    (row,) = rows_of(config, [2], timings, "NVIDIA H200")
    assert row[1] == "–" and row[2] == "1.000" and row[5:10] == ["–"] * 5
