"""The Triton kernels through jax-triton, native on the GPU that is there: the shared contract."""

import importlib.util
import os

import pytest

from pallas_kernels.triton import device
from tests.pallas_kernels.contract import AttentionContract

if importlib.util.find_spec("jax_triton") is None:
    pytest.skip("needs the extra ampere", allow_module_level=True)


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    """Unlike the other tests of this folder these need no Hopper GPU, but any that Triton knows."""
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
