"""Selection of the backend for a kernel call.

Backends are kept in a registry, best one first; code outside `pallas_kernels` refers to them by
name only.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeGuard, cast

import jax
from jax import Array

from pallas_kernels.checks import Shaped
from pallas_kernels.gradients import Gradients
from pallas_kernels.mosaic_gpu.on_demand import MosaicGpuOnDemand
from pallas_kernels.plans import Plan
from pallas_kernels.tiles import Columns, Tiles
from pallas_kernels.triton import device as triton_device
from pallas_kernels.triton.backend import Triton
from pallas_kernels.xla.backend import Xla

_log = logging.getLogger(__name__)


class Estimate(Protocol):
    """Optional kernels that score key blocks by the attention of the last queries."""

    def unsupported(self, q: Shaped) -> str | None:
        """Why the kernels do not support last queries q [B, Hq, num_probe_queries, D], or None."""
        ...

    def block_statistics(
        self,
        q: Array,
        k: Array,
        block_ids: Array,
        num_blocks: int,
        *,
        scale: float,
        valid_len: Array | None = None,
        queries: Array | None = None,
    ) -> tuple[Array, Array]:
        """Implements `pallas_kernels.mosaic_gpu.kernels.estimate.block_statistics`."""
        ...

    def block_masses(
        self,
        q: Array,
        k: Array,
        block_ids: Array,
        num_blocks: int,
        peak: Array,
        to_mass: Array,
        *,
        scale: float,
        valid_len: Array | None = None,
        queries: Array | None = None,
    ) -> tuple[Array, Array, Array]:
        """Implements `pallas_kernels.mosaic_gpu.kernels.estimate.block_masses`."""
        ...


class BlockScores(Protocol):
    """Optional kernels that score key blocks by the softmax mass of rows of queries."""

    def unsupported(self, q: Shaped, k: Shaped) -> str | None:
        """Why the kernels do not support these shapes and dtypes, or None."""
        ...

    def block_masses(
        self,
        q: Array,
        k: Array,
        places: Array,
        first_blocks: Array | None = None,
        *,
        scale: float,
        levels: bool = False,
    ) -> Array | tuple[Array, Array]:
        """Computes the softmax mass of each key block, mean over the rows of a query block.

        A row's result depends on no other row and not on the number of its first block: selection
        is then the same on any number of ranks and in any pack.

        Args:
            q: [B, Hq, n, r, E], r rows of each of n query blocks.
            k: [B, Hk, NB, c, E], c rows of each key block, in sequence order.
            places: int32 [B or 1, n, r], the last key row (b * c + j) that each row sees, or -1.
            first_blocks: int32 [B, n], first key block that the rows of a query block see, or None.
            scale: scale of the logits.
            levels: whether to also return each row's level, the product q k with weight 1.

        Returns:
            fp32 [B, Hq, n, NB]; a row sums to the fraction of its r rows that see any key. With
            `levels`, a pair of it and fp32 [B, Hq, n, r] (arbitrary for a row that sees nothing).
        """
        ...


class Backend(Protocol):
    """Implementation of the functions of `pallas_kernels.ops`, under a name to select it by."""

    @property
    def name(self) -> str: ...

    @property
    def estimate(self) -> Estimate | None: ...

    @property
    def block_scores(self) -> BlockScores | None: ...

    def unsupported(self, q: Shaped, block_size: int | None) -> str | None:
        """Why a call is not supported here, or None; `block_size` is None without blocks."""
        ...

    def plan(
        self, q: Shaped, k: Shaped, tiles: Tiles | None, columns: Columns | None, *, whole: bool
    ) -> Any:
        """Returns `Plan.work`, a pytree."""
        ...

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        plan: Plan,
        column_kv: tuple[Array, Array] | None,
        *,
        scale: float,
        init: tuple[Array, Array] | None,
        out_dtype: Any,
        beside_transfers: bool,
    ) -> tuple[Array, Array]: ...

    def backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        dout: Array,
        lse: Array,
        delta: Array,
        plan: Plan,
        column_kv: tuple[Array, Array] | None,
        *,
        scale: float,
        dq_dtype: Any,
        key_dtype: Any | None,
        beside_transfers: bool,
    ) -> Gradients: ...

    def delta_of(self, out: Array, dout: Array) -> Array: ...


class Description(NamedTuple):
    """The backend of a call, and why no better one is used (None if there is no better one)."""

    name: str
    reason: str | None


_PORTABLE = "xla"
# How much slower XLA selects an index than the kernels, where both were timed.
_ESTIMATE_COST = "several times slower"
_BLOCK_SCORES_COST = "an order of magnitude slower"
_registered: dict[str, Backend] = {}
_chosen_by_name_only: set[str] = set()
_chosen_where: dict[str, Callable[[], bool]] = {}


def register(
    backend: Backend, *, by_name_only: bool = False, where: Callable[[], bool] | None = None
) -> None:
    """Adds a backend at the end of the registry, or replaces the one of the same name.

    Args:
        backend: the backend.
        by_name_only: whether it is used only if requested by name.
        where: whether automatic selection considers it for the target; None for everywhere.
    """
    _registered[backend.name] = backend
    if where is not None:
        _chosen_where[backend.name] = where
    if by_name_only:
        _chosen_by_name_only.add(backend.name)


def names() -> tuple[str, ...]:
    """Returns the names of all backends that are selected automatically, best one first."""
    return tuple(name for name in _registered if name not in _chosen_by_name_only)


def named(name: str) -> Backend:
    """Returns a backend by name; raises ValueError if there is none."""
    if name not in _registered:
        raise ValueError(f"unknown backend={name!r}; choose from {', '.join(names())}")
    return _registered[name]


def resolve(name: str | None, q: Shaped, block_size: int | None = None) -> Backend:
    """Selects the backend of a call; logs once if it falls back to XLA.

    Args:
        name: name of a backend; None or "auto" for the fastest available one.
        q: queries or an output; only dtype and head dim are read.
        block_size: tokens per block (g); None for calls without blocks.

    Raises:
        ValueError: if the name is unknown, or the backend does not support the call here.
    """
    found, reason = describe(name, q, block_size)
    if reason is not None and found == _PORTABLE:
        _say_once(f"attention runs on the portable XLA backend: {reason}", _level())
    return named(found)


def describe(name: str | None, q: Shaped, block_size: int | None = None) -> Description:
    """Returns the backend of a call and why no better one is used; see `resolve`."""
    if _by_name(name):
        reason = named(name).unsupported(q, block_size)
        if reason is not None:
            raise ValueError(f"backend={name!r} cannot run here: {reason}")
        return Description(name, None)
    reasons = []
    for candidate in names():
        if candidate in _chosen_where and not _chosen_where[candidate]():
            continue
        reason = named(candidate).unsupported(q, block_size)
        if reason is None:
            return Description(candidate, "; ".join(reasons) or None)
        reasons.append(reason)
    raise ValueError(f"no backend can run here: {'; '.join(reasons)}")


def estimate_kernels(name: str | None, q: Shaped, block_size: int) -> Estimate | None:
    """Returns the kernels that select by the last queries q [B, Hq, num_probe_queries, D]; None for XLA.

    Raises:
        ValueError: as in `resolve`, or a backend requested by name does not support the queries.
    """
    kernels = resolve(name, q, block_size).estimate
    reason = None if kernels is None else kernels.unsupported(q)
    return kernels if reason is None else _left_to_xla(name, reason, _ESTIMATE_COST)


def block_score_kernels(
    name: str | None, q: Shaped, block_size: int, rows: Shaped, keys: Shaped
) -> BlockScores | None:
    """Returns the kernels that score key blocks for rows of queries; None for XLA.

    Args:
        name, q, block_size: as in `resolve`.
        rows, keys: `q` and `k` of `BlockScores.block_masses`.

    Raises:
        ValueError: as in `resolve`, or a backend requested by name does not support the rows.
    """
    kernels = resolve(name, q, block_size).block_scores
    reason = None if kernels is None else kernels.unsupported(rows, keys)
    return kernels if reason is None else _left_to_xla(name, reason, _BLOCK_SCORES_COST)


def _left_to_xla(name: str | None, reason: str, cost: str) -> None:
    if _by_name(name):
        raise ValueError(
            f'backend={name!r} has no kernel for this index selection: {reason}; backend="auto" '
            f"leaves the selection to XLA, which is {cost}"
        )
    _say_once(
        f"index selection runs on the portable XLA backend, which is {cost} and writes its logits "
        f"to memory in fp32: {reason}",
        _level(),
    )


def _by_name(name: str | None) -> TypeGuard[str]:
    return name not in (None, "auto")


def _level() -> int:
    """A warning on a GPU, where kernels are expected; elsewhere XLA is the normal backend."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if abstract is None else abstract.platform
    return logging.WARNING if platform == "gpu" else logging.INFO


@functools.cache
def _say_once(message: str, level: int) -> None:
    _log.log(level, message)


# The class looks up most attributes in the backend that it imports.
register(cast(Backend, MosaicGpuOnDemand()))
register(Triton(), where=triton_device.before_hopper)
register(Xla())
