"""The ring in which the devices of a node gather their keys and values instead of turning them.

With few key/value heads the keys and values of a whole node are small, and one kernel call then
does the work of an inner turn: its running output and lse stay on the chip. Between nodes each
device still sends its own shard on, which is gathered where it arrives: the slow links carry no
byte twice.

Communication is arranged so that XLA can hide it. The node's first gathering hides behind the
work on the rank's own shard, which needs none of it (in the striped layout, where that work is
separate). In each outer step the next node's shard travels and is gathered while the kernel works
on the one before. In the backward pass the gradients that a step sends home are those of the step
before.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.parallel.layout import Segment
from mtraining_jax.parallel.ordering import after
from mtraining_jax.parallel.ring.rank_kernels import Call, Pair, Steps, join, plus
from mtraining_jax.parallel.ring.shard_tiles import segment_pairs
from mtraining_jax.parallel.ring.topology import RingTopology


def gather_forward(plan: RingTopology, steps: Steps, kv: Pair) -> list[tuple[Array, Array]]:
    """Output and lse of every query segment.

    Args:
        plan: one that gathers.
        steps: of the forward pass.
        kv: keys and values of this rank.
    """
    node = _Node(plan, steps)
    here = node.gather(kv)
    state = [None] * len(steps.queries)
    if node.own_apart:
        state = steps.forward(steps.calls_on(steps.rank, kv, False), state, last=False)
    # The columns are not needed before the last step. Fetched at once, their sum over nodes would
    # have the gathering awaited before the first kernel.
    source = lax.optimization_barrier((here, state))[0] if plan.outer_axes else here
    kv = node.after_columns(kv, source)

    def visit(step: Array | int, here: Pair, state: list, last: bool) -> list:
        return steps.forward(node.calls(step, here, with_columns=last), state, last)

    end = plan.outer_size - 1
    if end == 0:
        return visit(0, here, state, True)

    def body(carry, step):
        kv, here, state = carry
        kv, arriving = node.next(kv)
        return (kv, arriving, visit(step, here, state, False)), None

    (kv, here, state), _ = body((kv, here, state), 0)
    if end > 1:
        steps_between = jnp.arange(1, end, dtype=jnp.int32)
        (kv, here, state), _ = lax.scan(body, (kv, here, state), steps_between)
    return visit(end, here, state, True)


def gather_backward(plan: RingTopology, steps: Steps, kv: Pair, rows: tuple[Array, Array, Array]):
    """Gradients.

    Args:
        plan, steps, kv: as in `gather_forward`, of the backward pass.
        rows: as in `Steps.backward`.

    Returns:
        dq of every query segment; (dk, dv) of this rank's keys and values; all fp32.
    """
    node = _Node(plan, steps)
    here = node.gather(kv)
    dq = [None] * len(steps.queries)
    collected = None
    if node.own_apart:
        dq, own, _ = steps.backward(steps.calls_on(steps.rank, kv, False), rows, dq)
        # First dk and dv of the rank's own keys, which the gathering hides behind; then those that
        # others wait for. XLA would take them the other way round.
        here, collected = lax.optimization_barrier((here, join(own)))
    kv = node.after_columns(kv, here)

    def visit(step: Array | int, here: Pair, dq: list, first: bool):
        dq, dkv, columns = steps.backward(node.calls(step, here, with_columns=first), rows, dq)
        return dq, node.restore(dkv), columns

    size = plan.outer_size
    if size > 1:
        kv, arriving = node.next(kv)
    dq, shares, columns = visit(0, here, dq, True)
    if columns is not None and plan.outer_axes:
        columns = after(columns, shares[0])
    shares = steps.return_columns(shares, columns)
    if size == 1:
        return dq, plus(collected, node.scatter(shares))

    def body(carry, step):
        kv, here, collected, shares, dq = carry
        # What the step before found goes home, and on with the keys and values it is of.
        collected = plan.shift_outer(plus(collected, node.scatter(shares)))
        kv, arriving = node.next(kv)
        dq, shares, _ = visit(step, here, dq, False)
        return (kv, arriving, collected, shares, dq), None

    here = arriving
    if collected is None:
        collected = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), kv)
    if size > 2:
        (kv, here, collected, shares, dq), _ = lax.scan(
            body, (kv, here, collected, shares, dq), jnp.arange(1, size - 1, dtype=jnp.int32)
        )
    collected = plan.shift_outer(plus(collected, node.scatter(shares)))
    dq, shares, _ = visit(size - 1, here, dq, False)
    return dq, plan.shift_outer(plus(collected, node.scatter(shares)))


class _Node:
    """The shards of a node as one."""

    def __init__(self, plan: RingTopology, steps: Steps):
        self.plan, self.steps = plan, steps
        # Stripes are told apart by the residue of a diagonal; elsewhere they are neighbours.
        self.own_apart = plan.layout.kind == "striped"

    def gather(self, kv: Pair) -> Pair:
        """[B, n, Hk, D] of every device of the node, one after another along the tokens."""
        axes = self.plan.inner_axes
        return jax.tree.map(lambda x: lax.all_gather(x, axes, axis=1, tiled=True), kv)

    def scatter(self, shares: Pair) -> Pair:
        """The sum of all devices' gradients of this device's part of what was gathered."""
        axes = self.plan.inner_axes
        return jax.tree.map(
            lambda x: lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True), shares
        )

    def next(self, kv: Pair) -> tuple[Pair, Pair]:
        """The shard of the same device of the next node, and all shards of that node."""
        kv = self.plan.shift_outer(kv)
        return kv, self.gather(kv)

    def after_columns(self, kv: Pair, here: Pair) -> Pair:
        """Fetches the columns; the shard to send on, held back until then where that matters."""
        ranks = self.plan.node_ranks(self.steps.rank, 0)
        self.steps.fetch_columns(here, ranks, self.plan.outer_axes)
        if not self.plan.outer_axes:
            return kv
        return after(kv, self.steps.column_kv[0] if self.steps.columns else here[0])

    def calls(self, step: Array | int, here: Pair, with_columns: bool):
        """The calls on a node's keys and values; without the rank's own where they are apart."""
        steps, layout = self.steps, self.plan.layout
        ranks = self.plan.node_ranks(steps.rank, step)
        if self.own_apart:
            (query,), (keys,) = steps.segments, layout.segments(ranks)
            own_here = isinstance(step, int) and step == 0
            tiles = steps.tiles.gathered(query, keys.first_block, skip_first=own_here)
            yield Call(0, 0, tiles, *steps.columns_for(0, 0, with_columns), *here)
            return
        keys, values = (self._arrange(x) for x in here)
        sources = self._segments(ranks)
        for i, j in segment_pairs(layout):
            tiles = steps.tiles.pair(steps.segments[i], sources[j])
            columns = steps.columns_for(i, j, with_columns)
            yield Call(i, j, tiles, *columns, keys[j], values[j])

    def restore(self, dkv: list[Pair]) -> Pair:
        """Gradients of the key segments of `calls`, in the order of `gather`."""
        if len(dkv) == 1:
            return dkv[0]
        size = self.plan.inner_size

        def interleave(first: Array, second: Array) -> Array:
            first, second = (x.reshape(x.shape[0], size, -1, *x.shape[2:]) for x in (first, second))
            both = jnp.stack([first, jnp.flip(second, axis=1)], axis=2)
            return both.reshape(both.shape[0], -1, *both.shape[4:])

        return jax.tree.map(interleave, *dkv)

    def _arrange(self, x: Array) -> list[Array]:
        """The key segments of a node, each in the order of the sequence.

        Second segments of a zigzag are in the reverse order of the devices.
        """
        count = len(self.steps.segments)
        if count == 1:
            return [x]
        parts = x.reshape(x.shape[0], self.plan.inner_size, count, -1, *x.shape[2:])
        first, second = parts[:, :, 0], jnp.flip(parts[:, :, 1], axis=1)
        return [part.reshape(x.shape[0], -1, *x.shape[2:]) for part in (first, second)]

    def _segments(self, ranks: Array) -> list[Segment]:
        """The key segments of a node, from neighbouring chunks of its devices."""
        size = self.plan.inner_size
        return [
            Segment(jnp.min(segment.first_block), segment.stride, size * segment.num_blocks)
            for segment in self.plan.layout.segments(ranks)
        ]
