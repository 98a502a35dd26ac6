"""The Hopper kernels in Pallas' GPU interpreter: tiny shapes, every copy and barrier checked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels import DiagonalTiles
from pallas_kernels.mosaic_gpu.backend import CONFIGS, MosaicGpu
from pallas_kernels.mosaic_gpu.work_queue import queue_memory, queue_operands
from tests.pallas_kernels.helpers import cases
from tests.pallas_kernels.helpers.cases import Size
from tests.pallas_kernels.helpers.contract import AttentionContract, backward, forward
from tests.pallas_kernels.mosaic_gpu.hopper_backends import registered

DIM = 64
WATCHED = plgpu.InterpretGPUParams(detect_races=True)
UNWATCHED = plgpu.InterpretGPUParams(detect_races=False)


@pytest.fixture
def races():
    """The interpreter's race detection result, reset after the test."""
    yield interpreter.get_races
    interpreter.reset_gpu_interpret_mode_state()


class _Interpreted(AttentionContract):
    dtypes = ("bfloat16",)
    block_size = 128
    dim = DIM
    batch = 1
    num_blocks = 2
    heads = (2, 1)
    group_heads = ((2, 1),)
    max_slashes = 3
    max_verticals = 16
    detect_races = True

    @pytest.fixture(autouse=True)
    def _find_races(self, races):
        """Checks for races at the end."""
        yield
        if self.detect_races:
            assert not races().races_found


# A tile takes tens of milliseconds, so only the tests that cover most of the kernels' code run.
class TestInterpreted(_Interpreted):
    backend = registered("interpreted", interpret=WATCHED, one_backward_kernel=False)
    kept = ("test_vertical_slash_matches_oracle", "test_running_result_is_merged")


class TestWideHeadsInterpreted(_Interpreted):
    """The other head dim, and lists; races are checked above."""

    dim = 128
    backend = registered("interpreted, unwatched", interpret=UNWATCHED, one_backward_kernel=False)
    kept = (
        "test_listed_blocks_of_gathered_keys_count_each_pair_once",
        "test_listed_blocks_and_columns_count_each_pair_once",
        "test_listed_diagonal_tiles_are_masked",
    )
    detect_races = False


class TestWidestHeadsInterpreted(_Interpreted):
    """Tiles of 64 keys, and dk and dv in separate warpgroups."""

    dim = 256
    backend = registered("interpreted, widest heads", interpret=WATCHED)
    kept = ("test_vertical_slash_matches_oracle", "test_listed_diagonal_tiles_are_masked")


class TestOneBackwardKernelInterpreted(_Interpreted):
    """Items run one after another here; an item that runs before its turn leaves NaN."""

    backend = registered(
        "interpreted, one backward kernel", interpret=UNWATCHED, one_backward_kernel=True
    )
    kept = (
        "test_vertical_slash_matches_oracle",
        "test_keys_of_several_ranks_in_one_call",
        "test_windows_match_oracle",
    )
    # The interpreter ignores turns: it reports additions of two items as a race.
    detect_races = False


# The other pairs of a kind of tiles and a configuration.
@pytest.mark.slow
class TestInterpretedMore(TestInterpreted):
    kept = ("test_keys_of_several_ranks_in_one_call",)


@pytest.mark.slow
class TestWideHeadsInterpretedMore(TestWideHeadsInterpreted):
    kept = ("test_vertical_slash_counts_each_pair_once", "test_windows_match_oracle")


@pytest.mark.slow
class TestWidestHeadsInterpretedMore(TestWidestHeadsInterpreted):
    kept = ("test_block_sparse_matches_oracle",)


@pytest.mark.slow
class TestOneBackwardKernelInterpretedMore(TestOneBackwardKernelInterpreted):
    kept = ("test_windows_count_each_pair_once",)


for _class in _Interpreted.__subclasses__() + [
    x for each in _Interpreted.__subclasses__() for x in each.__subclasses__()
]:
    for _name in dir(AttentionContract):
        if _name.startswith("test_"):
            kept = getattr(AttentionContract, _name) if _name in _class.kept else None
            setattr(_class, _name, kept)
del _class


def test_one_backward_kernel_has_no_races_within_an_item(races):
    """One tile of keys, seen by two blocks of queries: no other item adds to the same memory."""
    size = Size(1, 1, 1, query_blocks=2, key_blocks=1, block_size=128, dim=DIM)
    q, k, v, dout = cases.qkv_dout(np.random.default_rng(0), size, "bfloat16")
    tiles = DiagonalTiles.full(1, 1, 2, 1, 128, causal=True)
    out, lse = forward(q, k, v, tiles, backend="xla")
    delta = pallas_kernels.delta_of(out, dout)
    watched = registered("watched, one backward kernel", interpret=WATCHED)
    jax.block_until_ready(backward(q, k, v, dout, lse, delta, tiles, backend=watched))
    assert not races().races_found


@pytest.mark.parametrize("one_kernel", [True, False])
def test_complete_gradients_of_keys_are_written_in_their_dtype(one_kernel, races):
    """By the kernel that sums them, if no head of a group and no column follows."""
    size = Size(1, 2, 2, query_blocks=2, key_blocks=1, block_size=128, dim=DIM)
    q, k, v, dout = cases.qkv_dout(np.random.default_rng(0), size, "bfloat16")
    tiles = DiagonalTiles.full(1, 2, 2, 1, 128, causal=True)
    out, lse = forward(q, k, v, tiles, backend="xla")
    delta = pallas_kernels.delta_of(out, dout)
    name = f"one kernel: {one_kernel}"
    kernels = registered(name, interpret=WATCHED, one_backward_kernel=one_kernel)
    given = q, k, v, dout, lse, delta, tiles

    def gradients(dtype):
        found = backward(*given, backend=kernels, key_dtype=dtype)
        return found.dk, found.dv

    in_fp32 = gradients("float32")
    for x, y in zip(gradients("bfloat16"), in_fp32, strict=True):
        assert x.dtype == jnp.bfloat16 and y.dtype == jnp.float32
        np.testing.assert_array_equal(x, y.astype(jnp.bfloat16))
    assert not races().races_found
    program = jax.make_jaxpr(lambda: gradients("bfloat16"))()
    assert "bf16[1,128,2,64]" in str(program) and "f32[1,128,2,64]" not in str(program)
    expected = backward(*given, backend="xla")
    for x, y in zip(in_fp32, (expected.dk, expected.dv), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-2, atol=2e-2 * float(jnp.abs(y).max()))


def test_a_key_block_listed_by_every_row_is_split_into_parts():
    """The gradients of 16 key blocks, the first one seen by all 16 query blocks."""
    size = Size(1, 1, 1, query_blocks=16, key_blocks=16, block_size=128, dim=DIM)
    rng = np.random.default_rng(1)
    q, k, v, dout = cases.qkv_dout(rng, size, "bfloat16")
    mask = np.zeros((1, 1, 16, 16), bool)
    mask[:, :, :, 0] = mask[:, :, [3, 7], 1] = mask[:, :, 9, 9] = True
    tiles = cases.lists_of_mask(mask, 128).tiles()
    unwatched = MosaicGpu("parts", interpret=UNWATCHED)
    plan = jax.jit(lambda *args: unwatched.plan(*args, None, single_call=True))
    assert plan(q, k, tiles).keys.heavy.tolist() == [[[0]]]
    many = Size(1, 16, 16, query_blocks=16, key_blocks=16, block_size=128, dim=DIM)
    listed = cases.lists_of_mask(np.repeat(mask, 16, 1), 128).tiles()
    assert plan(*cases.qkv_dout(rng, many, "bfloat16")[:2], listed).keys.heavy is None
    out, lse = forward(q, k, v, tiles, backend="xla")
    delta = pallas_kernels.delta_of(out, dout)
    found, expected = (
        backward(q, k, v, dout, lse, delta, tiles, backend=backend)
        for backend in (registered("parts", interpret=UNWATCHED), "xla")
    )
    for x, y in zip((found.dk, found.dv), (expected.dk, expected.dv), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-2, atol=2e-2 * float(jnp.abs(y).max()))
    assert float(jnp.abs(found.dk[:, 2 * 128 : 9 * 128]).max()) == 0.0


@pytest.mark.parametrize(
    ("dim", "dtypes"), [(64, ("bfloat16",) * 2), (128, ("float32", "float16"))]
)
def test_delta_kernel(dim, dtypes, races):
    """Includes rows that do not fill a tile of the kernel."""
    rng = np.random.default_rng(dim)
    out, dout = (rng.standard_normal((2, 96, 3, dim)).astype(dtype) for dtype in dtypes)
    delta = MosaicGpu(interpret=WATCHED).delta_of(jnp.asarray(out), jnp.asarray(dout))
    expected = np.einsum("bnhd,bnhd->bhn", out.astype(np.float64), dout.astype(np.float64))
    np.testing.assert_allclose(delta, expected, rtol=1e-5, atol=1e-5)
    assert delta.dtype == jnp.float32
    assert not races().races_found


def test_a_number_is_read_before_another_one_takes_its_place():
    """The memory warpgroup draws while the others still read, by one for each block of queries."""
    slots = max(config.forward.query_slots for config in CONFIGS.values())
    assert queue_memory(True)["ahead"].shape[0] > slots == 2


@pytest.mark.parametrize("mapped", ["q", "lists", "lse0"])
def test_every_mapped_call_counts_its_items_alone(mapped):
    rng = np.random.default_rng(0)
    inputs = {
        "q": jnp.asarray(rng.standard_normal((1, 4, 2, 8)), jnp.bfloat16),
        "lists": jnp.asarray(rng.integers(-(2**31), 2**31, (1, 2, 4)), jnp.int32),
        "lse0": jnp.asarray([[-np.inf, np.nan, -1e30, 1.0]], jnp.float32),
    }
    copies = jnp.stack([inputs[mapped], -inputs[mapped], jnp.roll(inputs[mapped], 1, -1)])
    counters = jax.vmap(lambda x: queue_operands(True, inputs | {mapped: x})["counter"])(copies)
    assert counters.shape == (3, 1) and counters.dtype == jnp.int32 and not counters.any()
