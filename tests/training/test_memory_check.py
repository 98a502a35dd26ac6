"""A step that does not fit is refused before it runs."""

import re
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mtraining_jax.cli.train import main
from mtraining_jax.config import Config
from mtraining_jax.tools.plan.dry_run import ways_after
from mtraining_jax.training.memory_check import (
    allocate,
    check_memory,
    check_state_memory,
    pinning_notice,
)
from mtraining_jax.utils.errors import DoesNotFit, UserError
from mtraining_jax.utils.jax_platform import free_host_memory, host_memory
from tests.training.common import changed

GIB = 2**30


def program(temp: int, output: int, alias: int, host: int = 0, host_arguments: int = 0):
    sizes = types.SimpleNamespace(
        temp_size_in_bytes=temp,
        output_size_in_bytes=output,
        alias_size_in_bytes=alias,
        host_temp_size_in_bytes=host,
        host_argument_size_in_bytes=host_arguments,
    )
    return types.SimpleNamespace(memory_analysis=lambda: sizes)


class Device:
    def __init__(self, stats, platform="gpu"):
        self.stats, self.platform = stats, platform

    def __str__(self):
        return "cuda:1"

    def memory_stats(self):
        return self.stats


def nothing(size, device):
    """An allocation that always succeeds."""


def test_donated_outputs_take_no_memory():
    device, asked = Device({"bytes_limit": 10 * GIB, "bytes_in_use": 4 * GIB}), []
    check_memory(program(6 * GIB, 3 * GIB, 3 * GIB), [device], take=lambda *x: asked.append(x))
    assert asked == [(6 * GIB, device)]  # all that is free
    with pytest.raises(DoesNotFit, match=r"has only 6\.0 GiB free") as it:
        check_memory(program(6 * GIB, 3 * GIB, 3 * GIB - 1), [device], take=nothing)
    assert it.value.excess == 1


def test_a_run_says_how_much_host_memory_it_pins(monkeypatch):
    monkeypatch.setattr("mtraining_jax.training.memory_check.free_host_memory", lambda: 8 * GIB)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "20")
    devices = [Device(None), Device(None), Device(None, "cpu")]
    step = program(0, 0, 0, host=3 * GIB)
    assert pinning_notice(program(0, 0, 0), devices) is None
    assert pinning_notice(step, devices[2:]) is None  # only GPUs pin it
    expected = "its first run pins 6.0 GiB of host memory, up to 8.0 GiB with unused parts of XLA's"
    expected += " blocks, which takes 3 to 9 s"
    assert pinning_notice(step, devices) == expected
    trained = program(0, 0, 0, host=3 * GIB, host_arguments=14 * GIB)
    assert "pins 6.0 GiB of host memory, up to 12.0 GiB" in pinning_notice(trained, devices)
    monkeypatch.setattr("mtraining_jax.training.memory_check.free_host_memory", lambda: 7 * GIB)
    assert "; 7.0 GiB are free: if the system kills" in pinning_notice(step, devices)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "3")  # as the notice says
    assert "up to 6.0 GiB" in (cut := pinning_notice(step, devices)) and "kills" not in cut


def test_fragmented_memory_is_reported_before_devices_wait_for_each_other():
    asked = []

    def none(size, device):
        asked.append(size)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")

    cut = Device({"bytes_limit": 10 * GIB, "bytes_in_use": 4 * GIB})
    wanted = r"5\.0 GiB in one block .* cuda:1 has no free block of that size \(6\.0 GiB free"
    with pytest.raises(UserError, match=wanted):
        check_memory(program(5 * GIB, 3 * GIB, 3 * GIB), [cut], take=none)
    assert asked == [5 * GIB]

    def broken(size, device):
        raise jax.errors.JaxRuntimeError("INTERNAL: another fault")

    with pytest.raises(jax.errors.JaxRuntimeError, match="another fault"):
        check_memory(program(5 * GIB, 0, 0), [cut], take=broken)


def test_a_trial_raises_the_error_of_jax_without_memory():
    device = jax.devices()[5]
    allocate(3 * 2**20 + 1, device)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        allocate(2**47, device)


def test_reports_needed_and_free_memory():
    full = Device({"bytes_limit": 10 * GIB, "bytes_in_use": 5 * GIB})
    wanted = r"needs 6\.0 GiB .* cuda:1 has only 5\.0 GiB free of 10\.0"
    with pytest.raises(UserError, match=wanted):
        check_memory(program(5 * GIB, 4 * GIB, 3 * GIB), [Device(None), full])


def test_a_device_without_memory_statistics_is_not_checked():
    asked, free = [], Device({"bytes_limit": 10 * GIB, "bytes_in_use": 0})
    devices = [Device(None), Device({}), free]
    check_memory(program(5 * GIB, 0, 0), devices, take=lambda _, device: asked.append(device))
    assert asked == [free]  # no allocation on the others either


def test_cpu_devices_share_the_memory_of_the_machine(monkeypatch):
    monkeypatch.setattr("mtraining_jax.training.memory_check.host_memory", lambda: 16 * GIB)
    devices = [Device(None, "cpu")] * 4
    check_memory(program(4 * GIB, 0, 0), devices)
    with pytest.raises(UserError, match=r"5\.0 GiB on each of 4 CPU devices .* has 16\.0 GiB"):
        check_memory(program(5 * GIB, 0, 0), devices)


def test_the_state_is_checked_before_it_is_created(monkeypatch):
    monkeypatch.setattr("mtraining_jax.training.memory_check.host_memory", lambda: 16 * GIB)
    mesh = jax.make_mesh((8,), ("device",), axis_types=(AxisType.Auto,))

    def of(spec):
        sharding = NamedSharding(mesh, PartitionSpec(spec))
        return {"w": jax.ShapeDtypeStruct((GIB,), jnp.float32, sharding=sharding)}

    check_state_memory(of("device"), mesh.local_devices)
    with pytest.raises(UserError, match=r"state .* needs 4\.0 GiB on each of 8 CPU devices.* 16"):
        check_state_memory(of(None), mesh.local_devices)


def test_moments_on_the_host_are_compared_with_its_free_memory(monkeypatch):
    monkeypatch.setattr("mtraining_jax.training.memory_check.free_host_memory", lambda: 7 * GIB)
    mesh = jax.sharding.AbstractMesh((1,), ("device",))
    host = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
    state = {"mu": jax.ShapeDtypeStruct((GIB,), jnp.float32, sharding=host)}
    gpu = Device({"bytes_limit": 2 * GIB, "bytes_in_use": GIB})
    check_state_memory(state, [gpu])
    sentence = r"optimizer\.offload needs 8\.0 GiB of host memory .* only 7\.0 GiB free of"
    with pytest.raises(DoesNotFit, match=sentence) as it:
        check_state_memory(state, [gpu] * 2)
    assert it.value.free == GIB
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "3")
    sentence = r"optimizer\.offload needs 4\.0 GiB of pinned .*_LIMIT_GB = 3 \(GiB\); raise"
    with pytest.raises(UserError, match=sentence):
        check_state_memory(state, [gpu])


def test_a_command_names_settings_that_fit(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mtraining_jax.training.memory_check.host_memory", lambda: 280 * 2**20)
    path = tmp_path / "small.toml"
    model = {"hidden_size": 256, "intermediate_size": 1024, "num_layers": 8}
    path.write_text(changed(config, model=model).to_toml())
    monkeypatch.setattr("sys.argv", ["train.py", "--config", "small.toml"])
    assert main(["--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert "it fits, by formulas, with python train.py --config small.toml --" in error
    assert "--parallel.fsdp=true" in error


def test_offloading_is_compared_with_free_host_memory(monkeypatch):
    monkeypatch.setattr("mtraining_jax.training.memory_check.free_host_memory", lambda: 30 * GIB)
    gpu = Device({"bytes_limit": 80 * GIB, "bytes_in_use": 34 * GIB})
    check_memory(program(37 * GIB, 0, 0, host=15 * GIB), [gpu] * 2, take=nothing)
    with pytest.raises(DoesNotFit, match=r"needs 36\.0 GiB of host memory .* only 30\.0 GiB") as it:
        check_memory(program(37 * GIB, 0, 0, host=18 * GIB), [gpu] * 2, take=nothing)
    assert it.value.excess == -9 * GIB  # of a GPU: it has more than the step needs
    # The state is already pinned. The limit is of each GPU.
    step = program(37 * GIB, 0, 0, host=15 * GIB, host_arguments=GIB)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "16")
    check_memory(step, [gpu] * 2, take=nothing)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "15")
    with pytest.raises(UserError, match=r"step needs 16\.0 GiB of pinned .*_LIMIT_GB = 15 \(GiB"):
        check_memory(step, [gpu] * 2, take=nothing)


def test_an_offload_that_the_host_cannot_hold_is_not_proposed(monkeypatch):
    """One H100, Qwen2.5-3B at 131072 tokens: refused with attention, 54.5 GiB of 38.4."""
    chosen = {
        "data.seq_len": "131072",
        "parallel.devices_per_node": "1",
        "model.remat": "attention",
    }
    config = Config.load("qwen3b_512k", chosen)
    monkeypatch.setattr("sys.argv", ["train.py", "--config=qwen3b_512k"])
    error = DoesNotFit("it needs too much", excess=int(16.1 * GIB))
    free = "mtraining_jax.tools.plan.dry_run.free_host_memory"
    monkeypatch.setattr(free, lambda: 8 * 64 * GIB)  # for eight devices of the test
    wanted = r"^it fits, by formulas, with python train.py .*--model.remat=attention_offload"
    assert re.search(wanted, ways_after(error, config))
    monkeypatch.setattr(free, lambda: 8 * 9 * GIB)
    wanted = r"^--model.remat=attention_offload .* needs 18.0 GiB .*9.0 are .* --model.remat=full"
    assert re.search(wanted, ways_after(error, config))
    evaluation = DoesNotFit("the evaluation needs too much")
    assert ways_after(evaluation, config).startswith("use parallel.fsdp=true")


def test_a_container_may_have_less_than_its_machine(monkeypatch, tmp_path):
    whole = host_memory()
    monkeypatch.setattr("mtraining_jax.utils.jax_platform._CGROUP_LIMIT", tmp_path / "memory.max")
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert host_memory() == GIB
    (tmp_path / "memory.current").write_text("1000000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100000000\n")
    assert free_host_memory() == GIB - 900_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory() >= whole >= free_host_memory() > 0
