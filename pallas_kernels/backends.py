"""Which backend runs a kernel call."""

from types import ModuleType

from jax import Array

from pallas_kernels import xla

BACKENDS = ("xla",)


def resolve(backend: str | None, q: Array) -> ModuleType:
    """The module that implements `forward` and `backward` for this call.

    Args:
        backend: a name of `BACKENDS`, or None for the best that runs here.
        q: the queries; their dtype and head dim may decide.

    Raises:
        ValueError: on a name that is not a backend.
    """
    del q
    if backend is None or backend in ("auto", "xla"):
        return xla
    raise ValueError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}")
