"""Lowering for a Hopper GPU on a machine that has none."""

import jax


def hopper():
    """A context in which programs are traced for an H200."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((), (), abstract_device=device)
    )
