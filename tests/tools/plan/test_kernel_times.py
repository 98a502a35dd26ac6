"""Kernel rates, their interpolation, and predicted attention times."""

import dataclasses

import numpy as np
import pytest

from mtraining_jax.tools.plan.kernel_times import (
    KERNEL_RATES,
    AttentionSize,
    documents_ms,
    kernel_seconds,
    pack_ms,
    rates_at,
)

SIZE = AttentionSize(num_layers=36, num_heads=16, head_dim=128)


def test_rates_are_interpolated_linearly():
    for width, rows in KERNEL_RATES.items():
        densities = [density for density, *_ in rows]
        assert densities == sorted(set(densities))
        for density, *rates in rows:
            assert rates_at(width, density) == tuple(rates)
        middle = rates_at(width, sum(densities[-2:]) / 2)
        assert middle[0] == pytest.approx((rows[-2][1] + rows[-1][1]) / 2)
        # Constant outside of the table.
        assert rates_at(width, 0.0) == rates_at(width, densities[0])
    assert rates_at(16, 0.5) == rates_at(64, 0.5)


def test_documents_ms_against_a_loop():
    lengths, densities = [1, 128, 5000, 70_000], [1.0, 1.0, 0.6, 0.2]
    size = dataclasses.replace(SIZE, ranks=4, passes=2)
    found = documents_ms(np.array(lengths), np.array(densities), size)
    for length, density, ms in zip(lengths, densities, found, strict=True):
        blocks = (length + 127) // 128
        pairs = density * sum(range(1, 128 * blocks + 1))
        forward, backward, in_ring = rates_at(128, density)
        seconds = 36 * 16 * 128 * pairs * (8 / forward + 10 / backward)
        # Four GPUs: two thirds (log 4 / log 8) of the loss in a ring of eight.
        assert ms == pytest.approx(1e3 * seconds / (4 * (1 - (1 - in_ring) * 2 / 3)))
    assert pack_ms(np.array(lengths), np.array(densities), size) == pytest.approx(found.sum())


def test_time_on_one_device_is_that_of_its_kernels():
    pairs = 0.063 * 524288 * 524289 / 2
    flops = [36 * 16 * 128 * pairs * each for each in (4, 10)]
    alone = pack_ms(np.array([524288]), np.array([0.063]), SIZE)
    assert alone == pytest.approx(1e3 * kernel_seconds(128, 0.063, *flops))


def test_times_match_the_measured_ring_of_eight():
    # benchmarks/results/ring-h200x8-2026-11-22.md, gathered, mask B: one layer, 75.53 ms.
    size = AttentionSize(num_layers=1, num_heads=16, head_dim=128, ranks=8)
    density = 0.0620 + 0.0054
    assert pack_ms(np.array([524288]), np.array([density]), size) == pytest.approx(75.53, rel=0.05)
    # Dense: 865.8 ms.
    assert pack_ms(np.array([524288]), np.array([1.0]), size) == pytest.approx(865.8, rel=0.05)
