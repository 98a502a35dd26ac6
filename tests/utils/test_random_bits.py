"""Random streams, against values computed with another implementation."""

import numpy as np
import pytest

from mtraining_jax.utils.random_bits import Stream


def test_bits_are_those_of_splitmix64():
    expected = [0x9E29780C22976897, 0x58CF273829F6399A, 0x90FC0FA55963C1EC]
    assert Stream(42).bits(3).tolist() == expected
    one_by_one = Stream(42)
    assert [int(one_by_one.bits(1)[0]) for _ in range(3)] == expected
    assert Stream(42 - 2**64).bits(3).tolist() == expected


def test_numbers_below_a_limit():
    stream = Stream(42)
    drawn = [1_000_000 + stream.below(9_000_000) for _ in range(4)]
    assert drawn == [6560382, 4122198, 6097115, 1660202]


def test_samples_are_without_replacement():
    drawn = Stream(3, 9).sample(50, 50)
    assert sorted(drawn) == list(range(50)) and drawn != list(range(50))
    assert Stream(3, 9).sample(50, 7) == drawn[:7]
    assert sorted(Stream(3, 9).order(50).tolist()) == list(range(50))
    with pytest.raises(ValueError, match="count=4 must not exceed n=3"):
        Stream(0).sample(3, 4)


def test_orders_are_uniform():
    for method in (lambda stream: stream.sample(4, 4), lambda stream: stream.order(4)):
        counts = np.zeros((4, 4))
        for seed in range(2000):
            counts[range(4), method(Stream(seed))] += 1
        assert np.abs(counts / 2000 - 0.25).max() < 0.04
