"""The Hopper kernels in Pallas' GPU interpreter: tiny shapes, every copy and barrier watched."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels.ops
from pallas_kernels import DiagonalTiles
from pallas_kernels.mosaic_gpu import backend
from tests.pallas_kernels import cases
from tests.pallas_kernels.backward_kernels import backend_with, one_kernel, two_kernels
from tests.pallas_kernels.cases import Size
from tests.pallas_kernels.contract import AttentionContract

DIM = 64


@pytest.fixture
def races():
    """What the interpreter found out about races, for a test to ask; forgotten after it."""
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
    backward = staticmethod(two_kernels)
    detect_races = True

    @pytest.fixture(autouse=True)
    def _interpret(self, monkeypatch, races):
        """Sends kernel calls to the interpreter, and looks for races at the end."""
        params = plgpu.InterpretGPUParams(detect_races=self.detect_races)
        kernels = backend_with(self.backward, interpret=params)
        monkeypatch.setattr(pallas_kernels.ops, "resolve", lambda *_, **__: kernels)
        yield
        if self.detect_races:
            assert not races().races_found


# A tile takes tens of milliseconds, so only the tests that reach most of the kernels' code run.
class TestInterpreted(_Interpreted):
    backend = "interpreted mosaic_gpu"
    kept = (
        "test_vertical_slash_counts_each_pair_once",
        "test_vertical_slash_matches_oracle",
        "test_running_result_is_merged",
        "test_keys_of_several_ranks_in_one_call",
    )


class TestOneBackwardKernelInterpreted(_Interpreted):
    """Items come one after another here; one whose turn it is not leaves NaN."""

    backend = "interpreted fused mosaic_gpu"
    kept = ("test_vertical_slash_matches_oracle", "test_keys_of_several_ranks_in_one_call")
    backward = staticmethod(one_kernel)
    # The interpreter does not know of turns: whatever two items add to is a race for it.
    detect_races = False


for _class in (TestInterpreted, TestOneBackwardKernelInterpreted):
    for _name in dir(AttentionContract):
        if _name.startswith("test_") and _name not in _class.kept:
            setattr(_class, _name, None)
del _class


def test_one_backward_kernel_has_no_races_within_an_item(races):
    """One tile of keys, seen by two blocks of queries: no other item adds to what it adds to."""
    size = Size(1, 1, 1, query_blocks=2, key_blocks=1, block_size=128, dim=DIM)
    q, k, v, dout = cases.qkv_dout(np.random.default_rng(0), size, "bfloat16")
    tiles = DiagonalTiles.full(1, 1, 2, 1, 128, causal=True)
    out, lse = pallas_kernels.forward(q, k, v, tiles, backend="xla")
    params = plgpu.InterpretGPUParams(detect_races=True)
    backward = functools.partial(backend.backward, scale=DIM**-0.5, interpret=params)
    delta = pallas_kernels.delta_of(out, dout)
    jax.block_until_ready(jax.jit(backward)(q, k, v, dout, lse, delta, tiles, None))
    assert not races().races_found


@pytest.mark.parametrize(
    ("dim", "dtypes"), [(64, ("bfloat16",) * 2), (128, ("float32", "float16"))]
)
def test_delta_kernel(dim, dtypes, races):
    """Rows that fill no tile of the kernel, too."""
    rng = np.random.default_rng(dim)
    out, dout = (rng.standard_normal((2, 96, 3, dim)).astype(dtype) for dtype in dtypes)
    params = plgpu.InterpretGPUParams(detect_races=True)
    delta = backend.delta_of(jnp.asarray(out), jnp.asarray(dout), interpret=params)
    expected = np.einsum("bnhd,bnhd->bhn", out.astype(np.float64), dout.astype(np.float64))
    np.testing.assert_allclose(delta, expected, rtol=1e-5, atol=1e-5)
    assert delta.dtype == jnp.float32
    assert not races().races_found
