"""A step that does not fit is refused before it runs."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mtraining_jax.cli.train import main
from mtraining_jax.config import config_to_toml
from mtraining_jax.training.memory_check import allocate, check_memory, check_state_memory
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.jax_platform import host_memory

GIB = 2**30


def program(temp: int, output: int, alias: int):
    sizes = types.SimpleNamespace(
        temp_size_in_bytes=temp, output_size_in_bytes=output, alias_size_in_bytes=alias
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
    device = Device({"bytes_limit": 10 * GIB, "bytes_in_use": 4 * GIB})
    check_memory(program(6 * GIB, 3 * GIB, 3 * GIB), [device], take=nothing)


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
    check_memory(program(5 * GIB, 0, 0), [Device(None), Device({})])


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


def test_a_command_names_an_option_that_fits(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mtraining_jax.training.memory_check.host_memory", lambda: 350_000)
    path = tmp_path / "small.toml"
    path.write_text(config_to_toml(config))
    assert main(["--config", str(path)]) == 2
    assert "it fits with --parallel.fsdp=true, by formulas" in capsys.readouterr().err


def test_a_container_may_have_less_than_its_machine(monkeypatch, tmp_path):
    whole = host_memory()
    monkeypatch.setattr("mtraining_jax.utils.jax_platform._CGROUP_LIMIT", tmp_path / "memory.max")
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert host_memory() == GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory() >= whole
