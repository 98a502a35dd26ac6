"""The GPU that kernels are compiled for: the local one, or a described one."""

from typing import Any

import jax

_HOPPER = 9  # major compute capability
_INTERPRETED_MULTIPROCESSORS = 2


def no_hopper_gpu() -> str | None:
    """Why the target, a described or the local device, is not a Hopper GPU; None if it is."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        capability = getattr(abstract, "compute_capability", None)
        if abstract.platform == "gpu" and (capability is None or _is_hopper(capability)):
            return None
        return f"the target is a {abstract.device_kind}, not a Hopper GPU"
    if jax.default_backend() != "gpu":
        return f"no GPU (platform {jax.default_backend()})"
    device = jax.devices()[0]
    if _is_hopper(device.compute_capability):
        return None
    return f"{device.device_kind} is not a Hopper GPU (compute capability 9.0)"


def multiprocessors(interpret: Any = False) -> int:
    """Returns the number of multiprocessors of the target GPU, or of Pallas' interpreter."""
    if interpret:
        return _INTERPRETED_MULTIPROCESSORS
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.num_cores:
        return abstract.num_cores
    return jax.devices("gpu")[0].core_count


def _is_hopper(capability: str) -> bool:
    return int(str(capability).split(".")[0]) == _HOPPER
