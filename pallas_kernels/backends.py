"""Which backend runs a kernel call, and why not another one.

A backend is an object that says what it supports. Backends are kept in a registry, best one first;
nothing outside `pallas_kernels` refers to one in another way.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
from jax import Array

from pallas_kernels.gradients import Gradients
from pallas_kernels.mosaic_gpu.on_demand import MosaicGpuOnDemand
from pallas_kernels.plans import Plan
from pallas_kernels.tiles import Columns, Tiles
from pallas_kernels.triton import device as triton_device
from pallas_kernels.triton.backend import Triton
from pallas_kernels.xla.backend import Xla

_log = logging.getLogger(__name__)


class Estimate(Protocol):
    """Kernels that score key blocks by the attention of the last queries: an optional extra."""

    def unsupported(self, q: Array) -> str | None:
        """Why these kernels cannot score by the last queries q [B, Hq, last_q, D], or None."""

    def block_statistics(
        self, q: Array, k: Array, block_ids: Array, num_blocks: int, *, scale: float,
        valid_len: Array | None = None, queries: Array | None = None,
    ) -> tuple[Array, Array]:
        """See `pallas_kernels.mosaic_gpu.kernels.estimate.block_statistics`."""

    def block_masses(
        self, q: Array, k: Array, block_ids: Array, num_blocks: int, peak: Array, to_mass: Array,
        *, scale: float, valid_len: Array | None = None, queries: Array | None = None,
    ) -> tuple[Array, Array, Array]:
        """See `pallas_kernels.mosaic_gpu.kernels.estimate.block_masses`."""


class BlockScores(Protocol):
    """Kernels that score key blocks by the softmax mass of rows of queries: an optional extra."""

    def unsupported(self, q: Array, k: Array) -> str | None:
        """Why these kernels cannot score queries and keys of these shapes and dtypes, or None."""

    def block_masses(
        self, q: Array, k: Array, places: Array, first_blocks: Array | None = None, *,
        scale: float, levels: bool = False,
    ) -> Array | tuple[Array, Array]:
        """Softmax mass that rows of queries give to each key block, mean over the rows of a block.

        The bits of a row of results may depend on its queries, its places and on the keys it sees,
        but not on the other rows of the call, nor on which number its first block has: the choice
        must be the same however rows are dealt to ranks, and in a pack what it is alone.

        Args:
            q: [B, Hq, n, r, E], r rows of each of n query blocks.
            k: [B, Hk, NB, c, E], c rows of each key block, in the order of the sequence; Hq is a
                multiple of Hk.
            places: int32 [B or 1, n, r]: a query row sees key row j of block b iff b * c + j <= its
                place; one with the place -1 sees nothing and adds nothing.
            first_blocks: int32 [B, n], before which the rows of a query block see no key block;
                None for 0.
            scale: of the logits.
            levels: whether to give the level of each row as well: the product q k that would have
                the weight 1, for a row that sees nothing any number.

        Returns:
            fp32 [B, Hq, n, NB]; a row adds up to the share of its r rows that see anything, up to
            rounding. With `levels`, a pair of it and fp32 [B, Hq, n, r].
        """


class Backend(Protocol):
    """What implements the functions of `pallas_kernels.ops`.

    Attributes:
        name: by which it is asked for.
        estimate: kernels that choose an index, or None.
        block_scores: kernels that score key blocks for rows of queries, or None.
    """

    name: str
    estimate: Estimate | None
    block_scores: BlockScores | None

    def unsupported(self, q: Array, block_size: int | None) -> str | None:
        """Why a call cannot run here, or None if it can.

        Args:
            q: queries or an output; their dtype and head dim may decide.
            block_size: g; None where the call knows no blocks.
        """

    def plan(
        self, q: Array, k: Array, tiles: Tiles | None, columns: Columns | None, *, whole: bool
    ) -> Any:
        """`Plan.work`, a pytree; arguments as those of `pallas_kernels.ops.plan`."""

    def forward(
        self, q: Array, k: Array, v: Array, plan: Plan, column_kv: tuple[Array, Array] | None, *,
        scale: float, init: tuple[Array, Array] | None, out_dtype: Any, beside_transfers: bool,
    ) -> tuple[Array, Array]:
        """See `pallas_kernels.ops.forward`."""

    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, lse: Array, delta: Array, plan: Plan,
        column_kv: tuple[Array, Array] | None, *, scale: float, dq_dtype: Any,
        key_dtype: Any | None, beside_transfers: bool,
    ) -> Gradients:
        """See `pallas_kernels.ops.backward`."""

    def delta_of(self, out: Array, dout: Array) -> Array:
        """See `pallas_kernels.ops.delta_of`."""


class Description(NamedTuple):
    """Which backend runs a call, and why the ones before it in the registry do not.

    Attributes:
        name: of the backend.
        reason: why no better one runs; None if there is none, or it was asked for by name.
    """

    name: str
    reason: str | None


_PORTABLE = "xla"
_registered: dict[str, Backend] = {}
_chosen_by_name_only: set[str] = set()
_chosen_where: dict[str, Callable[[], bool]] = {}


def register(
    backend: Backend, *, by_name_only: bool = False, where: Callable[[], bool] | None = None
) -> None:
    """Adds a backend, behind those that are there already.

    Args:
        backend: replaces the one of the same name.
        by_name_only: whether it is never chosen unless asked for.
        where: whether it is a candidate on the machine that is compiled for, unless asked for by
            name; None for everywhere.
    """
    _registered[backend.name] = backend
    if where is not None:
        _chosen_where[backend.name] = where
    if by_name_only:
        _chosen_by_name_only.add(backend.name)


def names() -> tuple[str, ...]:
    """The names of all backends that are chosen without being asked for, best one first."""
    return tuple(name for name in _registered if name not in _chosen_by_name_only)


def named(name: str) -> Backend:
    """The backend of a name.

    Raises:
        ValueError: on a name that is not a backend's.
    """
    if name not in _registered:
        raise ValueError(f"backend={name!r} is not one of {', '.join(names())}")
    return _registered[name]


def resolve(name: str | None, q: Array, block_size: int | None = None) -> Backend:
    """The backend that runs a call.

    Args:
        name: of a backend; None or "auto" for the best that runs here.
        q: as in `Backend.unsupported`.
        block_size: as in `Backend.unsupported`.

    Raises:
        ValueError: on a name that is not a backend's, or a backend that cannot run this call here.
    """
    found, reason = describe(name, q, block_size)
    if reason is not None and found == _PORTABLE:
        _say_once(f"attention runs on the portable XLA backend: {reason}", _level())
    return named(found)


def describe(name: str | None, q: Array, block_size: int | None = None) -> Description:
    """Which backend runs a call, and why no better one; arguments and errors as in `resolve`."""
    if name not in (None, "auto"):
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


def estimate_kernels(name: str | None, q: Array, block_size: int) -> Estimate | None:
    """The kernels that score key blocks for a choice of an index; None leaves it to XLA.

    Args:
        name: as in `resolve`.
        q: [B, Hq, last_q, D], the last queries of the sequence.
        block_size: g.

    Raises:
        ValueError: as `resolve`.
    """
    return _if_supported(resolve(name, q, block_size).estimate, q)


def block_score_kernels(
    name: str | None, q: Array, block_size: int, rows: Array, keys: Array
) -> BlockScores | None:
    """The kernels that score key blocks for rows of queries; None leaves it to XLA.

    Args:
        name: as in `resolve`.
        q: the queries of the attention, as in `resolve`.
        block_size: g.
        rows: the rows of queries to score for, as in `BlockScores.block_masses`.
        keys: the keys there.

    Raises:
        ValueError: as `resolve`.
    """
    return _if_supported(resolve(name, q, block_size).block_scores, rows, keys)


def _if_supported[Kernels: (Estimate, BlockScores)](
    kernels: Kernels | None, *arrays: Array
) -> Kernels | None:
    """A backend's kernels if it has them and they can run on some arrays; once says why not."""
    reason = None if kernels is None else kernels.unsupported(*arrays)
    if reason is None:
        return kernels
    _say_left_to_xla(reason)
    return None


def _say_left_to_xla(reason: str) -> None:
    _say_once(f"the choice of an index runs on the portable XLA backend: {reason}", _level())


def _level() -> int:
    """A warning on a GPU, where its kernels are expected; elsewhere XLA is what users expect."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if abstract is None else abstract.platform
    return logging.WARNING if platform == "gpu" else logging.INFO


@functools.cache
def _say_once(message: str, level: int) -> None:
    _log.log(level, message)


register(MosaicGpuOnDemand())
register(Triton(), where=triton_device.before_hopper)
register(Xla())
