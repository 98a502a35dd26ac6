import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from mtraining_jax.parallel import mesh as meshes


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """A device as seen by `make_mesh`; replaces those of other processes."""

    id: int
    process_index: int


def devices_of(*processes):
    return [FakeDevice(i, process) for i, process in enumerate(processes)]


def test_mesh_has_three_auto_axes_in_order():
    mesh = meshes.make_mesh(2, 2, 2)
    assert mesh.axis_names == ("data", "node", "device")
    assert mesh.devices.shape == (2, 2, 2)
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert mesh.devices.reshape(-1).tolist() == jax.devices()


def test_tokens_are_sharded_over_batch_and_sequence():
    mesh = meshes.make_mesh(2, 2, 2)
    x = jax.device_put(np.zeros((4, 8)), jax.sharding.NamedSharding(mesh, meshes.TOKENS))
    assert {shard.data.shape for shard in x.addressable_shards} == {(2, 2)}


def test_nodes_follow_processes_even_if_devices_are_interleaved():
    devices = devices_of(0, 1, 0, 1, 0, 1)
    mesh = meshes.make_mesh(1, 2, 3, devices)
    assert [[d.process_index for d in node] for node in mesh.devices[0]] == [[0] * 3, [1] * 3]


def test_a_subset_of_devices_is_taken_evenly_from_all_processes():
    mesh = meshes.make_mesh(1, 2, 1, devices_of(0, 0, 1, 1))
    assert [d.id for d in mesh.devices.reshape(-1)] == [0, 2]


def test_an_uneven_split_over_processes_raises():
    with pytest.raises(ValueError, match="3 devices, which cannot be split evenly over 2 proc"):
        meshes.make_mesh(1, 1, 3, devices_of(0, 0, 1, 1))


def test_too_few_devices_raise_with_both_numbers():
    sentence = "^data=1 x nodes=2 x devices_per_node=8 needs 16 devices but there are 8"
    with pytest.raises(ValueError, match=sentence):
        meshes.make_mesh(1, 2, 8)


def test_a_size_below_one_raises():
    with pytest.raises(ValueError, match="^nodes=0 must be at least 1"):
        meshes.make_mesh(1, 0, 8)
