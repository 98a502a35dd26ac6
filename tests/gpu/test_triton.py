"""The Triton kernels through jax-triton, native on the local GPU: the shared contract."""

import importlib.util
import os

import pytest

from pallas_kernels.triton import device
from tests.gpu import estimate_checks
from tests.pallas_kernels.helpers.contract import AttentionContract

if importlib.util.find_spec("jax_triton") is None:
    pytest.skip("needs the triton extra", allow_module_level=True)


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    """Unlike the other tests of this folder, these run on any GPU that Triton supports."""
    if os.environ.get("MTRAINING_TEST_GPU") != "1":
        pytest.skip("set MTRAINING_TEST_GPU=1 to run the tests that need a GPU")
    if reason := device.cannot_run():
        pytest.skip(reason)


class _Contract(AttentionContract):
    backend = "triton"
    dtypes = ("bfloat16", "float16")
    block_size = 128
    other_dims = ()
    num_blocks = 16
    group_heads = ((2, 2), (5, 1), (12, 2), (14, 2), (8, 1))  # groups of 1, 5, 6, 7 and 8
    max_slashes = 6
    max_verticals = 200


class TestHeadDim64(_Contract):
    dim = 64


class TestHeadDim128(_Contract):
    dim = 128


@pytest.mark.parametrize("shape", estimate_checks.SHAPES, ids=str)
def test_scores_by_the_last_queries_match_xla(shape):
    estimate_checks.check_scores("triton", shape)


@pytest.mark.parametrize("valid_len", [3000, 3072])  # of 4096, inside a block and at its end
def test_scores_before_padding_match_xla(valid_len):
    estimate_checks.check_scores_before_padding("triton", valid_len)


@pytest.mark.parametrize("shape", estimate_checks.SHAPES, ids=str)
def test_tiles_are_bit_identical_on_every_rank_of_every_layout(shape):
    estimate_checks.check_bits_of_ranks("triton", shape)


def test_the_selected_index_does_not_depend_on_the_order_of_blocks():
    estimate_checks.check_order_of_blocks("triton")
