"""Memory formulas of the dry run against the compiler.

Needs JAX's CUDA plugin but no GPU; takes a minute or two per mesh.
"""

import pytest

from mtraining_jax.config import Config
from mtraining_jax.tools.plan.compiled import compile_step, missing_plugin
from mtraining_jax.tools.plan.hardware import H200
from mtraining_jax.tools.plan.memory import estimate_memory
from tests.training.common import changed


@pytest.mark.skipif(missing_plugin() is not None, reason=str(missing_plugin()))
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("devices", "kept_chunks"), [(4, 0), (8, 0), (8, 2)])
def test_memory_matches_the_compiler(devices, kept_chunks):
    config = changed(
        Config.load("qwen3b_512k"),
        parallel={"devices_per_node": devices},
        model={"mlp_kept_chunks": kept_chunks},
    )
    compiled = compile_step(config, H200)
    assert estimate_memory(config).total == pytest.approx(compiled.peak, rel=0.1)
    assert compiled.host == 0


@pytest.mark.skipif(missing_plugin() is not None, reason=str(missing_plugin()))
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("offload", [True, "all"])
def test_arrays_on_the_host_take_no_memory_of_the_device(offload):
    one = {"parallel": {"devices_per_node": 1}, "data": {"seq_len": 32768}}
    config = changed(Config.load("qwen3b_512k"), **one, optimizer={"offload": offload})
    memory, compiled = estimate_memory(config), compile_step(config, H200)
    assert memory.optimizer < 1024
    assert memory.total == pytest.approx(compiled.peak, rel=0.1)
    assert memory.host == pytest.approx(compiled.host, rel=1e-3)  # no second copy there
