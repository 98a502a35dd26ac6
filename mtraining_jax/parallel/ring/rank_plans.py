"""Plans of one rank's kernel calls."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.ring.topology import RingTopology
from pallas_kernels import ops as kernels
from pallas_kernels.index import Index, Segment
from pallas_kernels.plans import Plan
from pallas_kernels.tiles import Tiles

StepPlans = tuple[Plan, ...]  # plans of one step, one per entry of `segment_pairs`


def segment_pairs(layout: Layout) -> list[tuple[int, int]]:
    """Lists pairs (query segment, key segment) with causal work on some pair of ranks.

    Segment i of any rank precedes segment i + 1 of any rank, so later key segments have none.
    """
    count = len(layout.segments(0))
    return [(i, j) for i in range(count) for j in range(i + 1)]


class RankPlanner:
    """Plans the attention of this rank's queries to the keys it receives.

    Args:
        topology: the ring.
        index: pairs to compute, in global positions; only this rank's rows if `by_rows`.
        q: [B, n, Hq, D], this rank's queries; only shape and dtype are read, as for k.
        k: [B, n, Hk, D], this rank's keys.
    """

    def __init__(self, topology: RingTopology, index: Index, q: Array, k: Array):
        layout = topology.layout
        self.rank = topology.rank()
        self._topology = topology
        self._queries = layout.segments(self.rank)
        self._q = jax.ShapeDtypeStruct(
            (q.shape[0], q.shape[1] // len(self._queries), *q.shape[2:]), q.dtype
        )
        self._k = k
        rows = layout.block_ids(self.rank)
        self._shards = index.shards(
            q.shape[0], q.shape[2], self._queries[0].stride, layout.num_blocks, rows
        )
        self._tokens = index.column_tokens(topology.every_row)
        self._columns = [
            index.columns(segment, layout.num_blocks, self._tokens, rows)
            for segment in self._queries
        ]
        self.has_columns = self._tokens is not None

    def column_positions(self, ranks: Array) -> Array | None:
        """Returns positions of columns in the concatenated shards of `ranks`, int32 [B, Hq, Mv]."""
        if self._tokens is None:
            return None
        return self._topology.layout.gathered_positions(self._tokens, ranks)

    def on_segments(self, keys: Sequence[Segment], with_columns: bool) -> StepPlans:
        """Plans the calls on the key segments of one step.

        With columns, the first call of each query segment also computes them.
        """
        return tuple(
            self._plan(
                self._shards.pair(self._queries[i], keys[j]),
                keys[j].num_blocks,
                self._columns[i] if with_columns and j == 0 else None,
            )
            for i, j in segment_pairs(self._topology.layout)
        )

    def on_stripes(self, ranks: Array, with_columns: bool, skip_own: bool) -> StepPlans:
        """Plans the call on the concatenated keys of `ranks`, int32 [n], in the striped layout.

        With `skip_own`, it skips this rank's own keys, which are among them.
        """
        (query,), (keys,) = self._queries, self._topology.layout.segments(ranks)
        tiles = self._shards.gathered(query, jnp.asarray(keys.first_block), skip_own)
        columns = self._columns[0] if with_columns else None
        return (self._plan(tiles, ranks.shape[0] * keys.num_blocks, columns),)

    def _plan(self, tiles: Tiles, num_key_blocks: int, columns) -> Plan:
        tokens = num_key_blocks * self._topology.layout.block_size
        keys = jax.ShapeDtypeStruct((self._k.shape[0], tokens, *self._k.shape[2:]), self._k.dtype)
        return kernels.plan(self._q, keys, tiles, columns, backend=self._topology.backend)


def step_of(plans: StepPlans, step: int) -> StepPlans:
    """Extracts one step from stacked plans."""
    return jax.tree.map(lambda x: x[step], plans)


def steps_between(plans: StepPlans, start: int, stop: int) -> StepPlans:
    """Extracts consecutive steps from stacked plans."""
    return jax.tree.map(lambda x: x[start:stop], plans)
