"""Masses of key blocks from 8-bit keys by the Hopper kernel, in Pallas' interpreter."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.kernels.fp8_scores import HopperFp8Scores
from tests.pallas_kernels.helpers.fp8_masses import (
    check_fp8_masses,
    check_fp8_masses_are_independent,
    check_kept_blocks,
    encode_keys,
    encode_rows,
)

WATCHED = HopperFp8Scores(plgpu.InterpretGPUParams(detect_races=True))


def test_masses_match_the_estimate():
    check_fp8_masses(WATCHED, blocks=3, first=15, dim=128)


def test_no_other_row_changes_a_bit():
    check_fp8_masses_are_independent(HopperFp8Scores(plgpu.InterpretGPUParams()))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 1, 1100, 3, 16), {"packed": False, "ties": False}),
        ((2, 1, 130, 2, 8), {"packed": True, "ties": False}),
        ((1, 1, 90, 2, 16), {"packed": False, "ties": True, "local": 2, "least": 1 << 20}),
    ],
)
def test_kept_blocks_are_the_heaviest(sizes, options):
    check_kept_blocks(WATCHED, sizes, **options)


def test_codes_are_within_their_range_and_precise():
    rng = np.random.default_rng(0)
    sizes = 2.0 ** rng.integers(-20, 20, size=(1, 4, 1, 1, 1))
    x = jnp.asarray(rng.normal(size=(1, 4, 128, 2, 64)) * sizes, jnp.bfloat16).reshape(
        1, 512, 2, 64
    )
    keys = encode_keys(x)
    codes = np.asarray(keys.codes, np.float32)
    assert 8 <= np.abs(codes).reshape(4, -1).max(1).min() and np.abs(codes).max() <= 16
    units = np.repeat(np.asarray(keys.units), 128, axis=1)[..., None]
    means = np.repeat(np.asarray(keys.means, np.float32), 128, axis=1)
    found, wanted = codes * units + means, np.asarray(x, np.float32)
    assert np.abs(found - wanted).max() <= 2**-4 * np.abs(wanted - means).max()
    assert (np.abs(found - wanted) <= 2**-4 * np.abs(wanted - means) + units * 2**-10).all()
    codes, units = encode_rows(jnp.zeros((1, 2, 1, 64), jnp.bfloat16))
    assert not np.asarray(codes, np.float32).any() and np.isfinite(units).all()
