"""The kernels that score key blocks: in Pallas' GPU interpreter, and lowered for a Hopper GPU."""

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.interface import ProbeCall
from pallas_kernels.mosaic_gpu.kernels.estimate import HopperEstimate
from tests.pallas_kernels.helpers.estimate import ROWS, TILE, check_sets_of_queries, check_sums
from tests.pallas_kernels.mosaic_gpu.hopper import hopper


@pytest.fixture
def kernels():
    """The kernels with interpreter parameters; checks for races at the end."""
    yield HopperEstimate(plgpu.InterpretGPUParams(detect_races=True))
    try:
        assert not interpreter.get_races().races_found
    finally:
        interpreter.reset_gpu_interpret_mode_state()


# A group of even size, and one of odd size with an incomplete last pair of heads. In the second
# case the last queries precede padding: one block is after all of them and one after some.
@pytest.mark.parametrize(
    ("heads", "kv_heads", "valid_len", "dim"),
    [(2, 1, None, 64), (3, 1, 430, 64), (2, 1, None, 256)],
)
def test_matches_brute_force(heads, kv_heads, valid_len, dim, kernels):
    check_sums(kernels, heads, kv_heads, valid_len, dim=dim)


def test_each_block_may_have_separate_queries_and_ends(kernels):
    check_sets_of_queries(kernels)


@pytest.mark.parametrize(
    ("group", "dim", "dtype"),
    [(1, 128, jnp.bfloat16), (5, 64, jnp.float16), (8, 128, jnp.bfloat16), (2, 256, jnp.bfloat16)],
)
def test_lowers_for_a_hopper_gpu(group, dim, dtype):
    num_blocks = 1024
    q = jax.ShapeDtypeStruct((2, 2 * group, ROWS, dim), dtype)
    k = jax.ShapeDtypeStruct((2, num_blocks * TILE, 2, dim), dtype)
    ids = jax.ShapeDtypeStruct((num_blocks,), jnp.int32)
    row = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    kernels, valid_len = HopperEstimate(), jnp.int32(1000) if group == 5 else None

    def call(q, k, ids):
        return ProbeCall(q, k, ids, num_blocks, 0.1, valid_len)

    def statistics(*where):
        return kernels.block_statistics(call(*where))

    def masses(peak, to_mass, *where):
        return kernels.block_masses(call(*where), peak, to_mass)

    with hopper():
        for kernel, args in ((statistics, (q, k, ids)), (masses, (row, row, q, k, ids))):
            lowered = jax.jit(kernel).trace(*args).lower(lowering_platforms=("cuda",))
            assert "mosaic_gpu" in lowered.as_text()
