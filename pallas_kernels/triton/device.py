"""The GPU that Triton kernels are compiled for, and whether they can run."""

from importlib.util import find_spec

import jax

_OLDEST = 80  # Ampere: the first with asynchronous copies and bf16 products
_HOPPER = 90


def capability() -> int | None:
    """Compute capability of the NVIDIA GPU that is compiled for, as 80 for 8.0; None for none.

    Inside `jax.sharding.use_abstract_mesh` with a device, that device decides. One that does not
    say what it has is taken for a Hopper GPU, as it is by the Hopper kernels.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None and jax.default_backend() == "gpu":
        device = jax.devices()[0]
    if device is None or device.platform != "gpu":
        return None
    major, _, minor = str(getattr(device, "compute_capability", "9.0")).partition(".")
    return 10 * int(major) + int(minor) if major.isdigit() and minor.isdigit() else None


def before_hopper() -> bool:
    """Whether it is a GPU that these kernels are made for: compute capability 8.x."""
    found = capability()
    return found is not None and _OLDEST <= found < _HOPPER


def cannot_run() -> str | None:
    """Why Triton kernels cannot run here, or None if they can."""
    found = capability()
    if found is None:
        return f"no NVIDIA GPU (platform {jax.default_backend()})"
    if found < _OLDEST:
        return f"compute capability {found / 10} (8.0 or later is needed)"
    if find_spec("jax_triton") is None:
        return (
            "Triton kernels need the extra ampere: uv sync --extra ampere, or pip install "
            "'.[ampere]' in a checkout"
        )
    return None
