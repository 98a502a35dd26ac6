"""The target GPU of Triton kernels, and whether they can run."""

import functools
import types
from importlib import metadata
from importlib.util import find_spec

import jax

_OLDEST = 80  # Ampere: the first with asynchronous copies and bf16 products
_HOPPER = 90


def capability() -> int | None:
    """Returns the compute capability of the target NVIDIA GPU, such as 80 for 8.0, or None."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None and jax.default_backend() == "gpu":
        device = jax.devices()[0]
    if device is None or device.platform != "gpu":
        return None
    major, _, minor = str(getattr(device, "compute_capability", "9.0")).partition(".")
    return 10 * int(major) + int(minor) if major.isdigit() and minor.isdigit() else None


def runs_by_default() -> bool:
    """Whether the target is an NVIDIA GPU of compute capability 8.0 or later, but not Hopper."""
    found = capability()
    return found is not None and found >= _OLDEST and found != _HOPPER


def cannot_run() -> str | None:
    found = capability()
    if found is None:
        return f"no NVIDIA GPU (platform {jax.default_backend()})"
    if found < _OLDEST:
        return f"compute capability {found / 10} (must be 8.0 or later)"
    if find_spec("jax_triton") is None:
        return (
            "Triton kernels need the triton extra: uv sync --extra triton, or pip install "
            "'.[triton]' in a checkout"
        )
    return unfit_triton()


@functools.cache
def unfit_triton() -> str | None:
    """Why jax-triton, which hides failed imports of Triton, cannot use it; None if it can."""
    try:
        from jax_triton import triton_lib  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        return f"jax-triton {_version('jax-triton')} cannot be imported: {error}"
    if isinstance(getattr(triton_lib, "cb", None), types.SimpleNamespace):
        return (
            f"jax-triton {_version('jax-triton')} cannot load the NVIDIA backend of triton "
            f"{_version('triton')} (it needs {_wanted()})"
        )
    return None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _wanted() -> str:
    try:
        needed = metadata.requires("jax-triton") or []
    except metadata.PackageNotFoundError:
        needed = []
    return next((line for line in needed if line.startswith("triton")), "a later one")
