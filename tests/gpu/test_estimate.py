"""The estimate on a Hopper GPU: kernels against XLA, and bit-identical in all layouts."""

import pytest

from tests.gpu import estimate_checks
from tests.gpu.estimate_checks import SHAPES

BACKEND = "mosaic_gpu"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_match_xla(shape):
    estimate_checks.check_scores(BACKEND, shape)


@pytest.mark.parametrize("valid_len", [3000, 3072])  # of 4096, inside a block and at its end
def test_scores_before_padding_match_xla(valid_len):
    estimate_checks.check_scores_before_padding(BACKEND, valid_len)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_are_bit_identical_on_every_rank_of_every_layout(shape):
    estimate_checks.check_bits_of_ranks(BACKEND, shape)


def test_the_index_does_not_depend_on_the_order_of_blocks():
    estimate_checks.check_order_of_blocks(BACKEND)
