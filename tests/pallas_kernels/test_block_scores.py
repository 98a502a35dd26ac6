"""Softmax masses of key blocks by the Hopper kernel, in Pallas' interpreter, against NumPy."""

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.kernels.block_scores import HopperBlockScores
from tests.pallas_kernels.helpers.block_masses import check_masses, check_masses_of_documents

WATCHED = HopperBlockScores(plgpu.InterpretGPUParams(detect_races=True))


# Query blocks, their rows, rows of a key block, their length, and the first query block's number.
@pytest.mark.parametrize(
    ("blocks", "rows", "columns", "length", "first"),
    [(24, 16, 16, 256, 0), (3, 128, 128, 64, 1), (16, 12, 64, 64, 2)],
)
def test_masses_match_a_softmax(blocks, rows, columns, length, first):
    check_masses(WATCHED, blocks, rows, columns, length, first)


def test_rows_see_no_block_before_their_document():
    check_masses_of_documents(WATCHED)


@pytest.mark.parametrize(
    ("length", "columns", "dtype", "reason"),
    [(64, 16, "float32", "dtypes float32"), (80, 16, "bfloat16", "rows of 80 components"),
     (64, 4, "float16", "4 rows of keys per block")],
)  # fmt: skip
def test_unsupported_inputs_are_explained(length, columns, dtype, reason):
    x = jnp.zeros((1, 1, 2, columns, length), dtype)
    assert WATCHED.unsupported(x, x).startswith(reason)
