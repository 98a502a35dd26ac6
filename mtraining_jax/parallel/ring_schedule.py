"""Who meets whom at which step of the ring, and which tiles they compute then."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mtraining_jax.errors import UserError
from mtraining_jax.parallel.layout import Layout, Segment
from pallas_kernels.index import VerticalSlashIndex
from pallas_kernels.tiles import NO_DIAGONAL, DiagonalTiles, SegmentedDiagonals

RINGS = ("hierarchical", "flat", "gather")


@dataclasses.dataclass(frozen=True)
class RingPlan:
    """The static description of a ring; usable inside `shard_map` over `axis_names`.

    A ring is two nested turns: at each of `outer_size` steps keys and values make a full turn
    over the inner axis while the next node's are on their way over the outer one. A flat ring is
    the case of one outer step.

    Attributes:
        layout: the layout of the sequence; `layout.num_ranks` must be the product of the sizes.
        axis_names: mesh axes of the sequence, slowest first.
        axis_sizes: their sizes.
        ring: "hierarchical" is two nested turns (with one axis, one turn); "flat" is one turn over
            all axes together; "gather" is an outer turn as "hierarchical", in which all devices
            of the inner axis gather each other's keys and values instead of an inner turn.
        scale: of the logits; None is 1/sqrt(D).
        backend: of the kernels; None is the best that runs here.

    Raises:
        UserError: if `ring` is unknown.
        ValueError: if the sizes do not fit the names or the layout.
    """

    layout: Layout
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    ring: str = "gather"
    scale: float | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        check_ring(self.ring)
        if len(self.axis_names) != len(self.axis_sizes) or len(self.axis_names) > 2:
            raise ValueError(
                f"axis_names={self.axis_names} and axis_sizes={self.axis_sizes} must be equally "
                "long, at most 2"
            )
        if self.inner_size * self.outer_size != self.layout.num_ranks:
            raise ValueError(
                f"axis_sizes={self.axis_sizes} have the product "
                f"{self.inner_size * self.outer_size} but the layout is for "
                f"num_ranks={self.layout.num_ranks}"
            )

    @property
    def nested(self) -> bool:
        """Whether the two axes turn separately."""
        return self.ring != "flat" and len(self.axis_names) == 2

    @property
    def gathers(self) -> bool:
        """Whether devices gather keys and values, which takes more than one of them."""
        return self.ring == "gather" and self.inner_size > 1

    @property
    def outer_size(self) -> int:
        """Outer steps: nodes in a hierarchical ring, 1 in a flat one."""
        return self.axis_sizes[0] if self.nested else 1

    @property
    def inner_size(self) -> int:
        """Inner steps: devices of a node, or all ranks in a flat ring."""
        total = 1
        for size in self.axis_sizes[1:] if self.nested else self.axis_sizes:
            total *= size
        return total

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """Mesh axes of the inner turn, or of the gathering in its place."""
        return self.axis_names[1:] if self.nested else self.axis_names

    @property
    def outer_axes(self) -> tuple[str, ...]:
        """Mesh axes of the outer turn; () if there is one outer step."""
        return self.axis_names[:1] if self.outer_size > 1 else ()

    def rank(self) -> Array | int:
        """This device's rank (traced), 0 where there is only one."""
        return lax.axis_index(self.axis_names) if self.axis_names else 0

    def source(self, rank: Array | int, outer_step: Array | int, inner_step: Array | int):
        """The rank whose keys `rank` holds at a step (ints, numpy or traced)."""
        node, device = rank // self.inner_size, rank % self.inner_size
        node = (node - outer_step) % self.outer_size
        return node * self.inner_size + (device - inner_step) % self.inner_size

    def node_ranks(self, rank: Array | int, outer_step: Array | int) -> Array:
        """Int32 [inner_size]: the ranks whose keys `rank` gathers at an outer step, in order."""
        node = (rank // self.inner_size - outer_step) % self.outer_size
        return node * self.inner_size + jnp.arange(self.inner_size, dtype=jnp.int32)

    def shift_inner(self, tree):
        """Sends every array of `tree` one rank on along the inner axis."""
        return _shift(tree, self.inner_axes, self.inner_size)

    def shift_outer(self, tree):
        """Sends every array of `tree` to the same device of the next node."""
        return _shift(tree, self.outer_axes, self.outer_size)


def check_ring(ring: str) -> None:
    """Raises UserError unless `ring` is one of `RINGS`."""
    if ring not in RINGS:
        raise UserError(f"ring={ring!r} is unknown; it must be one of {', '.join(RINGS)}")


def _shift(tree, axis_names: tuple[str, ...], size: int):
    permutation = [(i, (i + 1) % size) for i in range(size)]
    return jax.tree.map(lambda x: lax.ppermute(x, axis_names, permutation), tree)


def segment_pairs(layout: Layout) -> list[tuple[int, int]]:
    """Pairs (query segment, key segment) that can have causal work for some pair of ranks.

    Segment i of any rank lies before segment i + 1 of any rank, so later key segments have none.
    """
    count = len(layout.segments(0))
    return [(i, j) for i in range(count) for j in range(i + 1)]


class StepTiles:
    """The tiles of every (query segment, key segment) pair of a layer, from one sort.

    Query block i of a segment with first block a is global block a + s*i, key block j of one with
    first block c is c + s*j, s the stride. Block diagonal d lies in the pair iff
    d = a - c modulo s, as local offset i - j = (d - (a - c)) / s.

    Args:
        layout: gives the stride, and the blocks of a segment.
        index: the global index; None for all causal pairs.
        batch, num_heads: shape of the lists when `index` is None.
    """

    def __init__(
        self, layout: Layout, index: VerticalSlashIndex | None, batch: int, num_heads: int
    ):
        segment = layout.segments(0)[0]
        self._stride, self._num_blocks = segment.stride, segment.num_blocks
        self._block_size, self._dense = layout.block_size, index is None
        if index is None:
            every = _every_diagonal(self._stride, layout.num_blocks)
            self._diagonals, self._bounds = (
                jnp.broadcast_to(x, (batch, num_heads, x.size)) for x in every
            )
        else:
            self._diagonals, self._bounds = _by_residue(index, self._stride, layout.num_blocks)

    def pair(self, query: Segment, key: Segment) -> DiagonalTiles:
        """The tiles of queries in one segment and keys in another (first blocks may be traced).

        Both have the stride of the layout; the key segment may be longer than those of a rank.
        """
        lag = jnp.asarray(query.first_block - key.first_block, jnp.int32)
        diagonal = jnp.where(lag % self._stride == 0, -(lag // self._stride), NO_DIAGONAL)
        start, stop = self._runs((lag % self._stride)[None])
        offsets = (self._diagonals - lag) // self._stride
        return DiagonalTiles(
            offsets, start[..., 0], stop[..., 0], diagonal, self._block_size, self._dense
        )

    def gathered(self, query: Segment, keys: Array, skip_first: bool) -> SegmentedDiagonals:
        """The tiles of queries in one segment and keys in several, one after another.

        For the striped layout, where the first blocks of ranks all have different residues.

        Args:
            query: the queries.
            keys: int32 [n], first blocks of the key segments, each as long as the query's.
            skip_first: whether to leave out the segment with the nearest keys. Where the
                queries' own is among the segments, that is the one.
        """
        stride, count = self._stride, keys.shape[0]
        lags = jnp.asarray(query.first_block, jnp.int32) - keys
        residues = lags % stride
        # Nearest first. The queries' own segment, and with it the causal diagonal, has residue 0.
        order = jnp.argsort(residues).astype(jnp.int32)
        # The segment that each diagonal meets, and how far away it is.
        number = jnp.zeros(stride, jnp.int32).at[residues].set(jnp.arange(count, dtype=jnp.int32))
        lag = jnp.zeros(stride, jnp.int32).at[residues].set(lags)
        residue = self._diagonals % stride
        offsets = (self._diagonals - lag[residue]) // stride - number[residue] * self._num_blocks
        diagonal = jnp.where(lags[order[0]] == 0, -order[0] * self._num_blocks, NO_DIAGONAL)
        if skip_first:
            order, diagonal = order[1:], jnp.asarray(NO_DIAGONAL)
        start, stop = self._runs(residues[order])
        return SegmentedDiagonals(
            offsets, start, stop, order, diagonal, count, self._block_size, self._dense
        )

    def _runs(self, residues: Array) -> tuple[Array, Array]:
        """Where the diagonals of some residues begin and end: int32 [B, Hq, n] twice."""
        start = jnp.take(self._bounds, residues, axis=-1, mode="clip")
        return start, jnp.take(self._bounds, residues + 1, axis=-1, mode="clip")


def _every_diagonal(stride: int, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """All block diagonals, as `_by_residue` gives those of an index."""
    diagonals = np.arange(num_blocks, dtype=np.int32).reshape(-1, stride).T.reshape(-1)
    return diagonals, np.arange(stride + 1, dtype=np.int32) * (num_blocks // stride)


def _by_residue(
    index: VerticalSlashIndex, stride: int, num_blocks: int
) -> tuple[Array, Array]:
    """The slash blocks sorted by (d mod stride, d), and where each residue begins.

    Returns:
        diagonals: int32 [B, Hq, max(Ms, 1)]; entries past the last bound are padding.
        bounds: int32 [B, Hq, stride + 1]; residue x is at bounds[x] .. bounds[x + 1] - 1.
    """
    diagonals = DiagonalTiles.from_index(index).offsets  # at least one entry
    if stride == 1:
        zero = jnp.zeros_like(index.slash_count)
        return diagonals, jnp.stack([zero, index.slash_count], axis=-1)
    live = jnp.arange(diagonals.shape[-1], dtype=jnp.int32) < index.slash_count[..., None]
    keys = diagonals % stride * num_blocks + diagonals
    keys = jnp.sort(jnp.where(live, keys, stride * num_blocks), axis=-1)
    edges = jnp.arange(stride + 1, dtype=jnp.int32) * num_blocks
    bounds = jnp.sum(keys[..., None, :] < edges[:, None], axis=-1, dtype=jnp.int32)
    return keys % num_blocks, bounds
