"""The device mesh and the partition specs of all arrays.

The mesh always has three axes: 'data' for data parallelism, and ('node', 'device') together for
context parallelism. The context-parallel rank is node * L + device, with L devices per node.
"""

import itertools
import operator
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
DOCUMENTS = P(DATA_AXIS, None)  # [B, NB]: document of each block, in global order
OVERRIDES = P(DATA_AXIS, None)  # [B, L]: of each layer for a sequence
ACTIVATIONS = P(DATA_AXIS, SEQUENCE_AXES, None)  # [B, S, E]
HEADS = P(DATA_AXIS, SEQUENCE_AXES, None, None)  # [B, S, H, D]: queries, keys, values
REPLICATED = P()


_process = operator.attrgetter("process_index")


def make_mesh(
    data: int,
    nodes: int,
    devices_per_node: int,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Mesh:
    """Builds a mesh of shape (data, nodes, devices_per_node) with `AxisType.Auto` axes.

    Devices are ordered by process, and within a process as given. If fewer devices are requested
    than exist, every process contributes equally many.

    Raises:
        ValueError: if a size is below 1, there are too few devices, or the requested number
            cannot be split evenly over the processes.
    """
    shape = (data, nodes, devices_per_node)
    for name, size in zip(("data", "nodes", "devices_per_node"), shape, strict=True):
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    devices = sorted(jax.devices() if devices is None else devices, key=_process)
    needed = data * nodes * devices_per_node
    asked = (
        f"data={data} x nodes={nodes} x devices_per_node={devices_per_node} needs {needed} devices"
    )
    if needed > len(devices):
        raise ValueError(f"{asked} but there are {len(devices)}")
    if needed < len(devices):
        processes = [list(own) for _, own in itertools.groupby(devices, key=_process)]
        share, rest = divmod(needed, len(processes))
        smallest = min(map(len, processes))
        if rest or share > smallest:
            raise ValueError(
                f"{asked}, which cannot be split evenly over {len(processes)} processes "
                f"(the smallest has {smallest} devices)"
            )
        devices = [device for own in processes for device in own[:share]]
    return Mesh(np.array(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
