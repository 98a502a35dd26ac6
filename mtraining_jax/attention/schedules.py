"""How attention over a mesh is carried out, by the kind of index."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.ring.ring_attention import ring_schedule
from mtraining_jax.parallel.ring.windows import RingWindow
from mtraining_jax.selection import collectives
from pallas_kernels.chunks import PastChunks
from pallas_kernels.index import Index, TokenChunksIndex, WindowIndex
from pallas_kernels.one_device import OneDevice, schedule_of
from pallas_kernels.ops import scale_of
from pallas_kernels.schedule import Schedule


def schedule_over(
    axes: tuple[str, ...],
    layout: Layout | None,
    ring: str,
    q: Array,
    k: Array,
    v: Array,
    index: Index,
    scale: float | None,
    backend: str | None,
) -> Schedule:
    """The schedule of a rank, for arrays and an index as in `ring_attention`.

    `axes` are those that shard the sequence, () for one device.
    """
    if not axes or layout is None:
        return schedule_of(q, k, index, scale, backend)
    scale = scale_of(scale, q)
    if isinstance(index, WindowIndex):
        return RingWindow(layout, axes, index.last, OneDevice(scale, backend))
    blocks = None
    if isinstance(index, TokenChunksIndex):
        blocks = RankBlocks(layout, axes)
        index = index.own(blocks.rows(layout.local_blocks))
    inner = ring_schedule(q, k, v, index, layout, axes, ring, scale, backend)
    return inner if blocks is None else PastChunks(inner, scale, blocks)


@dataclasses.dataclass(frozen=True)
class RankBlocks:
    """The blocks of a rank; keys and values of all ranks are gathered, across nodes too."""

    layout: Layout
    axes: tuple[str, ...]

    def rows(self, count: int) -> Array:
        return self.layout.block_ids(lax.axis_index(self.axes))

    def all(self, x_BnHD: Array) -> Array:
        layout = self.layout
        rows = self.rows(layout.local_blocks)
        return collectives.all_blocks(x_BnHD, rows, layout.num_blocks, self.axes)

    def local(self, x_BSHD: Array) -> Array:
        batch, tokens, *heads = x_BSHD.shape
        shape = batch, tokens // self.layout.num_ranks, *heads
        local = jax.ShapeDtypeStruct(shape, jnp.float32)
        return jax.linear_transpose(self.all, local)(x_BSHD.astype(jnp.float32))[0]
