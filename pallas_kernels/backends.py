"""Which backend runs a kernel call."""

import functools
import logging
from types import ModuleType

import jax
from jax import Array

from pallas_kernels import xla
from pallas_kernels.mosaic_gpu import backend as mosaic_gpu

BACKENDS = ("xla", "mosaic_gpu")
_HOPPER = 9  # major compute capability

_log = logging.getLogger(__name__)


def resolve(backend: str | None, q: Array, block_size: int | None = None) -> ModuleType:
    """The module that implements a function of `pallas_kernels.ops` for this call.

    Args:
        backend: a name of `BACKENDS`; None or "auto" for the best that runs here.
        q: the queries; their dtype and head dim may decide.
        block_size: g; None where the call knows no blocks.

    Raises:
        ValueError: on a name that is not a backend, or a backend that cannot run this call here.
    """
    if backend == "xla":
        return xla
    if backend not in (None, "auto", "mosaic_gpu"):
        raise ValueError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}")
    reason = no_hopper_gpu() or mosaic_gpu.unsupported(q, block_size)
    if reason is None:
        return mosaic_gpu
    if backend == "mosaic_gpu":
        raise ValueError(f"backend='mosaic_gpu' cannot run here: {reason}")
    _say_once(f"attention runs on the portable XLA backend: {reason}", _level())
    return xla


def no_hopper_gpu() -> str | None:
    """Why the Hopper kernels cannot run here, or None if they can.

    Inside `jax.sharding.use_abstract_mesh` with a device, that device decides: programs can be
    compiled for a GPU on a machine that has none.
    """
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


def _is_hopper(capability: str) -> bool:
    return int(str(capability).split(".")[0]) == _HOPPER


def _level() -> int:
    """Somebody with a GPU expects its kernels, and is warned; elsewhere XLA is what to expect."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if abstract is None else abstract.platform
    return logging.WARNING if platform == "gpu" else logging.INFO


@functools.cache
def _say_once(message: str, level: int) -> None:
    _log.log(level, message)
