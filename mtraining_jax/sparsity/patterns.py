"""Pattern objects: the settings of a way to choose which pairs attention computes."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
from jax import Array

from pallas_kernels.index import VerticalSlashIndex

PRESETS = ("safe", "paper")


class Pattern:
    """What attention asks of a pattern: a block size, and an index for some queries and keys.

    A pattern is a small frozen dataclass. One without arrays is static under `jax.jit`. One with
    arrays is registered as a pytree, and each of its arrays has the query heads as its leading
    axis, so that it can be sharded with them.

    Attributes:
        block_size: g, tokens on a side of a block.
    """

    block_size: int

    def choose(
        self,
        q: Array,
        k: Array,
        *,
        block_ids: Array,
        num_blocks: int,
        axis_names: Sequence[str] = (),
        scale: float | None = None,
        backend: str | None = None,
    ) -> VerticalSlashIndex | None:
        """The pairs to compute; None for every causal pair.

        Arguments and index are those of `choose_index`, and so is where it may be called: inside
        `jax.shard_map` on the shards of a sequence, or on one device. No gradient flows through.
        """
        from mtraining_jax.sparsity.vertical_slash import choose_index  # it imports this module

        return choose_index(
            q, k, self, block_ids=block_ids, num_blocks=num_blocks, axis_names=axis_names,
            scale=scale, backend=backend,
        )


@dataclasses.dataclass(frozen=True)
class Dense(Pattern):
    """Every causal pair: the limit of sparse, by the same kernels.

    Attributes:
        block_size: g, tokens on a side of a block.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    block_size: int = 128

    def __post_init__(self):
        _check_range("block_size", self.block_size, 1)

    def choose(
        self, q, k, *, block_ids, num_blocks, axis_names=(), scale=None, backend=None
    ) -> None:
        """No index: nothing is left out."""
        return None


@dataclasses.dataclass(frozen=True)
class VerticalSlash(Pattern):
    """Top-p choice: per head, the largest columns and diagonals until their mass reaches p.

    The two presets differ in what happens at the edges:

    - ``safe``: the entry that crosses p is kept, the first `sink_tokens` columns and the nearest
      `local_blocks` block diagonals are always kept, and so is a minimum number of columns and
      diagonals. No row of the attention matrix is ever empty.
    - ``paper``: as the reference implementation counts. The entry that crosses p is dropped, and
      nothing is forced, with one exception that it has too: its padding of a slash list that is
      not full switches the main block diagonal on. With a full list nothing is forced, and rows
      may be empty.

    Attributes:
        top_p: mass to keep of the columns, and again of the diagonals, in (0, 1].
        max_verticals: most columns kept, tokens.
        max_slashes: most diagonals kept, tokens. Each acts through at most two block diagonals.
        preset: "safe" or "paper".
        last_q: number of queries, at the end of the sequence, whose attention is the estimate.
        block_size: g, tokens on a side of a block; `last_q` must not exceed it.
        sink_tokens: first columns that are always kept (safe).
        local_blocks: block diagonals 0 .. local_blocks-1 are always on (safe).
        min_verticals: least columns kept (safe). One tile of columns is nearly free.
        min_slashes: least diagonals kept (safe). Small, since each scattered diagonal may cost
            two block diagonals.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    top_p: float = 0.90
    max_verticals: int = 4096
    max_slashes: int = 4096
    preset: str = "safe"
    last_q: int = 64
    block_size: int = 128
    sink_tokens: int = 30
    local_blocks: int = 2
    min_verticals: int = 128
    min_slashes: int = 16

    def __post_init__(self):
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if self.preset not in PRESETS:
            raise ValueError(f"preset={self.preset!r} must be one of {', '.join(PRESETS)}")
        _check_window(self.last_q, self.block_size)
        _check_range("max_verticals", self.max_verticals, 0)
        _check_range("max_slashes", self.max_slashes, 0)
        if self.preset == "safe":
            for name in ("sink_tokens", "min_verticals", "min_slashes"):
                cap = "max_slashes" if name == "min_slashes" else "max_verticals"
                _check_range(name, getattr(self, name), 0, getattr(self, cap), cap)
            _check_range("local_blocks", self.local_blocks, 1)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["verticals", "slashes"],
    meta_fields=[
        "max_verticals",
        "max_slashes",
        "last_q",
        "block_size",
        "sink_tokens",
        "sliding_window",
    ],
)
@dataclasses.dataclass(frozen=True)
class FixedBudget(Pattern):
    """Fixed numbers of columns and diagonals for each head, as MInference files give them.

    A pytree: the budgets are data, so a stack of layers [L, Hq] can be scanned over and each
    layer sees its own row; the caps are static and shared by all layers.

    Attributes:
        verticals: int32 [Hq], columns kept by each head.
        slashes: int32 [Hq], diagonals kept by each head.
        max_verticals: static cap, at least the largest entry of `verticals`.
        max_slashes: static cap, at least the largest entry of `slashes`.
        last_q: number of queries, at the end of the sequence, whose logits are the estimate.
        block_size: g, tokens on a side of a block; `last_q` must not exceed it.
        sink_tokens: the first columns rank above all others.
        sliding_window: the nearest diagonals rank above all others.
    """

    verticals: Array
    slashes: Array
    max_verticals: int
    max_slashes: int
    last_q: int = 64
    block_size: int = 128
    sink_tokens: int = 30
    sliding_window: int = 100

    def __post_init__(self):
        _check_window(self.last_q, self.block_size)
        for name in ("max_verticals", "max_slashes", "sink_tokens", "sliding_window"):
            _check_range(name, getattr(self, name), 0)


def _check_window(last_q: int, block_size: int):
    _check_range("block_size", block_size, 1)
    _check_range("last_q", last_q, 1, block_size, "block_size")


def _check_range(name: str, value: int, low: int, high: int | None = None, high_name: str = ""):
    if value < low:
        raise ValueError(f"{name}={value} must be at least {low}")
    if high is not None and value > high:
        raise ValueError(f"{name}={value} must not exceed {high_name}={high}")
