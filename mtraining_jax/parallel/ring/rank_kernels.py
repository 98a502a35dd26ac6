"""The kernel calls of one rank: its queries against keys and values that come from others."""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mtraining_jax.parallel.ring.columns import (
    gather_verticals,
    has_verticals,
    return_vertical_gradients,
)
from mtraining_jax.parallel.ring.shard_tiles import StepTiles, segment_pairs
from mtraining_jax.parallel.ring.topology import RingTopology
from pallas_kernels import ops as kernels
from pallas_kernels.index import VerticalSlashIndex
from pallas_kernels.tiles import Columns, Tiles, pad_columns

Pair = tuple[Array, Array]


class Call(NamedTuple):
    """One kernel call: a query segment of this rank against one segment of keys and values."""

    query: int
    key: int
    tiles: Tiles
    columns: Columns | None
    column_kv: Pair | None
    k: Array
    v: Array


class Steps:
    """What a rank computes with the keys and values it is shown; built once a layer and pass.

    Args:
        plan: the ring.
        q: [B, n, Hq, D], this rank's queries.
        index: the global index, or None.
    """

    def __init__(self, plan: RingTopology, q: Array, index: VerticalSlashIndex | None):
        self.plan, self.index = plan, index
        self.rank = plan.rank()
        self.transfers = plan.layout.num_ranks > 1
        self.segments = plan.layout.segments(self.rank)
        self.queries = self.split(q)
        self.tiles = StepTiles(plan.layout, index, q.shape[0], q.shape[2])
        self.columns: list[Columns] | None = None
        self.column_kv: Pair | None = None

    def fetch_columns(self, kv: Pair, ranks: Array, axis_names: tuple[str, ...]) -> None:
        """Fetches the columns that `calls_on` adds when asked; none if the index has no room.

        Args:
            kv: keys and values of `ranks`, one after another.
            ranks: int32 [n].
            axis_names: mesh axes over which ranks hold other keys and values.
        """
        if not has_verticals(self.index):
            return
        layout = self.plan.layout
        self._positions = layout.gathered_positions(pad_columns(self.index), ranks)
        self._axes = axis_names
        self.column_kv = gather_verticals(*kv, self._positions, axis_names)
        self.columns = [
            Columns.from_index(
                self.index,
                segment.first_block + segment.stride * jnp.arange(segment.num_blocks),
                layout.num_blocks,
            )
            for segment in self.segments
        ]

    def return_columns(self, dkv: Pair, columns: Pair | None) -> Pair:
        """Adds gradients of columns to those of the keys and values they were fetched from."""
        if columns is None:
            return dkv
        return return_vertical_gradients(*dkv, *columns, self._positions, self._axes)

    def calls_on(self, source: Array | int, kv: Pair, with_columns: bool) -> Iterable[Call]:
        """The calls on the shard of one rank; columns go with the first of a query segment."""
        keys, values = (self.split(x) for x in kv)
        sources = self.plan.layout.segments(source)
        for i, j in segment_pairs(self.plan.layout):
            tiles = self.tiles.pair(self.segments[i], sources[j])
            columns = self.columns_for(i, j, with_columns)
            yield Call(i, j, tiles, *columns, keys[j], values[j])

    def columns_for(
        self, i: int, j: int, wanted: bool
    ) -> tuple[Columns, Pair] | tuple[None, None]:
        """Columns for the call of query segment i and key segment j, if they are wanted."""
        if wanted and self.columns and j == 0:
            return self.columns[i], self.column_kv
        return None, None

    def forward(self, calls: Iterable[Call], state: list, last: bool) -> list:
        """Merges attention to the keys of some calls into the running state.

        Args:
            calls: with keys and values.
            state: running (output, lse) of each query segment, fp32, or None for nothing yet.
            last: whether the results are final, with the output in the dtype of the queries.
        """
        state = list(state)
        for call in calls:
            final = last and call.key == call.query  # no later segment has work
            state[call.query] = kernels.forward(
                self.queries[call.query], call.k, call.v, self._planned(call), call.column_kv,
                init=state[call.query], scale=self.plan.scale,
                out_dtype=self.queries[0].dtype if final else jnp.float32,
                beside_transfers=self.transfers,
            )
        return state

    def backward(self, calls: Iterable[Call], rows: tuple[Array, Array, Array], dq: list):
        """Gradients from some calls.

        Args:
            calls: as for `forward`.
            rows: gradient of the output [B, n, Hq, D]; lse and delta fp32 [B, Hq, n].
            dq: fp32 gradients of the query segments so far, or None for nothing yet.

        Returns:
            dq; fp32 (dk, dv) of each key segment; gradients of columns or None.
        """
        dq = list(dq)
        dout, lse, delta = (self.split(rows[0]), *(self.split(x, 2) for x in rows[1:]))
        dkv: list[Pair | None] = [None] * len(self.segments)
        columns = None
        for call in calls:
            i = call.query
            grads = kernels.backward(
                self.queries[i], call.k, call.v, dout[i], lse[i], delta[i], self._planned(call),
                call.column_kv, scale=self.plan.scale,
                beside_transfers=self.transfers,
            )
            dq[i] = plus(dq[i], grads.dq)
            dkv[call.key] = plus(dkv[call.key], (grads.dk, grads.dv))
            if call.columns is not None:
                columns = plus(columns, (grads.dk_columns, grads.dv_columns))
        return dq, dkv, columns

    def _planned(self, call: Call) -> kernels.Plan:
        """What the kernels of a call walk."""
        return kernels.plan(
            self.queries[call.query], call.k, call.tiles, call.columns, backend=self.plan.backend
        )

    def split(self, x: Array, axis: int = 1) -> list[Array]:
        """The parts of a shard along its token axis that belong to the rank's segments."""
        return jnp.split(x, len(self.segments), axis=axis)


def plus(total, share):
    """The sum of two trees of arrays, of which the first may be None for nothing yet."""
    return share if total is None else jax.tree.map(jnp.add, total, share)


def join(parts: Iterable[Pair]) -> Pair:
    """Gradients of the segments of a shard as those of the shard."""
    return tuple(jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))
