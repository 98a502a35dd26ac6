"""Lowering and compiling for a Hopper GPU on a machine without one."""

from pathlib import Path

import jax

_TARGET = Path(__file__).resolve().parents[3] / "mtraining_jax/tools/plan/h200.target_config.txtpb"


def hopper():
    """A context in which programs are traced for an H200."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def described_h200s(count: int) -> list:
    """Devices of one host to compile for; needs the CUDA plugin of JAX."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=_TARGET.read_text(), topology=f"1x1x{count}"
    )
    return topology.devices
