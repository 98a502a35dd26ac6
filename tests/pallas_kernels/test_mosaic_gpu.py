"""The Hopper kernels in Pallas' GPU interpreter: tiny shapes, every copy and barrier watched."""

import functools
import types

import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels.attention
from pallas_kernels.mosaic_gpu import backend
from tests.pallas_kernels.contract import AttentionContract

# A tile takes tens of milliseconds, so only the tests that reach most of the kernels' code run.
KEPT = (
    "test_vertical_slash_counts_each_pair_once",
    "test_vertical_slash_matches_oracle",
    "test_running_result_is_merged",
    "test_keys_of_several_ranks_in_one_call",
)


class TestInterpreted(AttentionContract):
    backend = "interpreted mosaic_gpu"
    dtypes = ("bfloat16",)
    block_size = 128
    dim = 64
    batch = 1
    num_blocks = 2
    heads = (2, 1)
    group_heads = ((2, 1),)
    max_slashes = 3
    max_verticals = 16

    @pytest.fixture(autouse=True)
    def _interpret(self, monkeypatch):
        """Sends kernel calls to the interpreter, and looks for races at the end."""
        params = plgpu.InterpretGPUParams(detect_races=True)
        kernels = types.SimpleNamespace(
            forward=functools.partial(backend.forward, interpret=params),
            backward=functools.partial(backend.backward, interpret=params),
        )
        monkeypatch.setattr(pallas_kernels.attention, "resolve", lambda *_, **__: kernels)
        yield
        try:
            assert not interpreter.get_races().races_found
        finally:
            interpreter.reset_gpu_interpret_mode_state()


for _name in dir(AttentionContract):
    if _name.startswith("test_") and _name not in KEPT:
        setattr(TestInterpreted, _name, None)
