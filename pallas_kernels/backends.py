"""Selection of the backend of a kernel call, by name or by target device."""

import functools
import importlib
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.checks import HEAD_DIMS, NARROW_HEAD_DIMS, Shaped
from pallas_kernels.fp8_scores import Fp8Scores
from pallas_kernels.interface import Backend, Decoding, Estimate
from pallas_kernels.masses import BlockScores
from pallas_kernels.mosaic_gpu import device
from pallas_kernels.triton.backend import Triton
from pallas_kernels.triton.device import runs_by_default
from pallas_kernels.xla.backend import Xla

_log = logging.getLogger(__name__)

# XLA took 20 times as long per block diagonal forward, 13 times for both passes
# (benchmarks/results/windows-h200-2026-11-26.md).
_ATTENTION_COST = "an order of magnitude slower"
# How much slower XLA selects an index than the kernels, where both were timed.
_ESTIMATE_COST = "several times slower"
_BLOCK_SCORES_COST = "an order of magnitude slower"

# Of the kernel for rows sorted by group: sizes of groups and widths of matrices are multiples.
GROUPED_ROWS, GROUPED_WIDTH = 128, 256

_AUTOMATIC = ("mosaic_gpu", "triton", "xla")  # the fastest first
_registered: dict[str, Backend] = {"triton": Triton(), "xla": Xla()}


def register(backend: Backend) -> None:
    """Adds a backend that is used where requested by name, or replaces the one of that name."""
    _registered[backend.name] = backend


def named(name: str) -> Backend:
    """Returns a backend by name; raises ValueError if there is none."""
    if name == "mosaic_gpu" and name not in _registered:
        # Importing Pallas Mosaic GPU takes seconds.
        register(importlib.import_module("pallas_kernels.mosaic_gpu.backend").MosaicGpu())
    if name not in _registered:
        raise ValueError(f"unknown backend={name!r}; choose from {', '.join(_AUTOMATIC)}")
    return _registered[name]


def resolve(name: str | None, q: Shaped, block_size: int | None = None) -> Backend:
    """Selects the backend of a call by name, or the fastest available one (None or "auto").

    Only dtype and head dim of `q` are read; `block_size` is None for calls without blocks. Logs
    once if it falls back to XLA; raises ValueError if the name is unknown or cannot run the call.
    """
    found, reason = describe(name, q, block_size)
    if reason is not None and found == "xla":
        cost = f", {_ATTENTION_COST} than the kernels" if _level() == logging.WARNING else ""
        _log_once(f"attention runs on the portable XLA backend{cost}: {reason}", _level())
    return named(found)


def kernel_width(name: str | None, q: Shaped, block_size: int) -> int:
    """Returns the head dim to which zeros extend that of `q` so that kernels run, or its own."""
    width = next((dim for dim in HEAD_DIMS if dim >= q.shape[-1]), q.shape[-1])
    extended = jax.ShapeDtypeStruct((*q.shape[:-1], width), q.dtype)
    same = width == q.shape[-1] or describe(name, extended, block_size)[0] == "xla"
    return q.shape[-1] if same else width


def describe(name: str | None, q: Shaped, block_size: int | None = None) -> tuple[str, str | None]:
    """Returns the name of a call's backend, and why no faster one is used; see `resolve`."""
    if name is not None and name != "auto":
        reason = _unsupported(name, q, block_size)
        if reason is not None:
            raise ValueError(f"backend={name!r} cannot run here: {reason}")
        return name, None
    reasons = []
    for candidate in _AUTOMATIC:
        if candidate == "triton" and not runs_by_default():
            continue
        reason = _unsupported(candidate, q, block_size)
        if reason is None:
            return candidate, "; ".join(reasons) or None
        reasons.append(reason)
    raise AssertionError("XLA runs every call")


def _unsupported(name: str, q: Shaped, block_size: int | None) -> str | None:
    # Without a Hopper GPU its backend is not loaded.
    loads = name == "mosaic_gpu" and name not in _registered
    reason = device.no_hopper_gpu() if loads else None
    return reason or named(name).unsupported(q, block_size)


def estimate_kernels(name: str | None, q: Shaped, block_size: int) -> Estimate | None:
    """Returns the kernels that select by probe queries q [B, Hq, u, D], or None; as `resolve`."""
    kernels = resolve(name, q, block_size).estimate
    reason = None if kernels is None else kernels.unsupported(q)
    return kernels if reason is None else _leave_to_xla(name, reason, _ESTIMATE_COST)


def block_score_kernels(
    name: str | None, q: Shaped, block_size: int, rows: Shaped, keys: Shaped
) -> BlockScores | None:
    """Returns the kernels for `rows` and `keys` of `BlockScores.block_masses`, or None for XLA."""
    kernels = resolve(name, q, block_size).block_scores
    reason = None if kernels is None else kernels.unsupported(rows, keys)
    return kernels if reason is None else _leave_to_xla(name, reason, _BLOCK_SCORES_COST)


def fp8_score_kernels(name: str | None, q: Shaped, block_size: int) -> Fp8Scores | None:
    """Returns the kernels that score 8-bit keys, or None; arguments and errors as in `resolve`."""
    kernels = resolve(name, q, block_size).fp8_scores
    return kernels if q.shape[-1] in NARROW_HEAD_DIMS else None


def grouped_widths(dtype: jnp.dtype, widths: tuple[int, int]) -> tuple[int, int]:
    """Returns the widths to pad matrices to for the kernel of `grouped_product`.

    They are unchanged without a kernel, or if padding adds more than an eighth to a width.
    """
    first, second = (-(-width // GROUPED_WIDTH) * GROUPED_WIDTH for width in widths)
    little = 8 * first <= 9 * widths[0] and 8 * second <= 9 * widths[1]
    runs = device.no_hopper_gpu() is None and dtype == jnp.bfloat16 and little
    return (first, second) if runs else widths


def grouped_product(dtype: jnp.dtype, widths: tuple[int, int]) -> Callable[..., Array] | None:
    """Returns the kernel for rows sorted by group, with matrices of `widths`, or None for XLA.

    The kernel takes the arguments of `mosaic_gpu.kernels.grouped.grouped_product`.
    """
    reason = device.no_hopper_gpu()
    if reason is None and dtype != jnp.bfloat16:
        reason = f"the kernel is for bfloat16, not for {dtype}"
    if reason is None and any(width % GROUPED_WIDTH for width in widths):
        reason = f"widths {widths[0]} and {widths[1]} are not multiples of {GROUPED_WIDTH}"
    if reason is None:
        return importlib.import_module("pallas_kernels.mosaic_gpu.kernels.grouped").grouped_product
    _log_once(f"experts run on XLA, on GPUs each of them for all tokens: {reason}", _level())
    return None


def decoding_kernels(name: str | None, q: Shaped) -> Decoding | None:
    """Returns the kernels for queries q [B, Hq, D] of new tokens, or None for XLA.

    Arguments and errors are those of `resolve`; XLA also runs heads that have no such kernel.
    """
    kernels = resolve(name, q).decoding
    if kernels is None or q.shape[-1] in NARROW_HEAD_DIMS:
        return kernels
    reason = f"head dim {q.shape[-1]} (must be 64 or 128)"
    _log_once(f"new tokens attend by the portable XLA backend: {reason}", _level())
    return None


def _leave_to_xla(name: str | None, reason: str, cost: str) -> None:
    if name is not None and name != "auto":
        raise ValueError(
            f'backend={name!r} has no kernel for this index selection: {reason}; backend="auto" '
            f"leaves the selection to XLA, which is {cost}"
        )
    _log_once(
        f"index selection runs on the portable XLA backend, which is {cost} and writes its logits "
        f"to memory in fp32: {reason}",
        _level(),
    )


def _level() -> int:
    """A warning on a GPU, where kernels are expected; elsewhere XLA is the normal backend."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if abstract is None else abstract.platform
    return logging.WARNING if platform == "gpu" else logging.INFO


@functools.cache
def _log_once(message: str, level: int) -> None:
    _log.log(level, message)
