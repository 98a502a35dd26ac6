"""The device mesh and the partition specs of all arrays.

The mesh always has three axes: 'data' for data parallelism, and ('node', 'device') together for
context parallelism. The context-parallel rank is node * L + device, with L devices per node.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

DATA_AXIS = "data"
NODE_AXIS = "node"
DEVICE_AXIS = "device"
AXES = (DATA_AXIS, NODE_AXIS, DEVICE_AXIS)
SEQUENCE_AXES = (NODE_AXIS, DEVICE_AXIS)

# Partition specs by logical array. Sequence axes are in layout order (see layout.py).
TOKENS = P(DATA_AXIS, SEQUENCE_AXES)  # [B, S]: tokens, labels, positions
DOCUMENTS = P(DATA_AXIS, None, None)  # [B, NB, 3]: document of each block, in global order
MASS_FRACTION = P(DATA_AXIS, None)  # [B, L]: of each layer for a sequence
ACTIVATIONS = P(DATA_AXIS, SEQUENCE_AXES, None)  # [B, S, E]
HEADS = P(DATA_AXIS, SEQUENCE_AXES, None, None)  # [B, S, H, D]: queries, keys, values
REPLICATED = P()


def make_mesh(
    data: int,
    nodes: int,
    devices_per_node: int,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Mesh:
    """Builds a mesh of shape (data, nodes, devices_per_node) with `AxisType.Auto` axes.

    Devices are ordered by process, and within a process as given. If processes are numbered node
    by node, 'device' stays inside a node and 'node' crosses nodes. If fewer devices are requested
    than exist, every process contributes equally many.

    Raises:
        ValueError: if a size is below 1, there are too few devices, or the requested number
            cannot be split evenly over the processes.
    """
    shape = (data, nodes, devices_per_node)
    for name, size in zip(("data", "nodes", "devices_per_node"), shape, strict=True):
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    devices = list(jax.devices() if devices is None else devices)
    needed = data * nodes * devices_per_node
    asked = (
        f"data={data} x nodes={nodes} x devices_per_node={devices_per_node} needs {needed} devices"
    )
    if needed > len(devices):
        raise ValueError(f"{asked} but there are {len(devices)}")
    by_process: dict[int, list[jax.Device]] = {}  # pyright: ignore[reportInvalidTypeForm]
    for device in sorted(devices, key=lambda device: device.process_index):
        by_process.setdefault(device.process_index, []).append(device)
    share, rest = divmod(needed, len(by_process))
    if needed < len(devices):
        smallest = min(len(own) for own in by_process.values())
        if rest or share > smallest:
            raise ValueError(
                f"{asked}, which cannot be split evenly over {len(by_process)} processes "
                f"(the smallest has {smallest} devices)"
            )
        by_process = {process: own[:share] for process, own in by_process.items()}
    chosen = [device for own in by_process.values() for device in own]
    return Mesh(np.array(chosen).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
