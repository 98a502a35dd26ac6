"""Attention as a model calls it: globally shaped arrays in, sharded work inside."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import DATA_AXIS, SEQUENCE_AXES
from mtraining_jax.parallel.ring import check_ring, ring_attention
from mtraining_jax.sparsity import (
    FixedBudget,
    Replay,
    VerticalSlash,
    attention_recall,
    causal_pairs,
    choose_index,
    density,
)
from pallas_kernels.index import VerticalSlashIndex

Pattern = VerticalSlash | FixedBudget | Replay
Stats = dict[str, Array]


def make_attention(
    mesh: Mesh,
    layout: Layout,
    pattern: Pattern | None,
    *,
    ring: str = "gather",
    backend: str | None = None,
    scale: float | None = None,
    recall_positions: Array | None = None,
    batch_axis: str = DATA_AXIS,
    sequence_axes: tuple[str, ...] = SEQUENCE_AXES,
) -> Callable[..., tuple[Array, Stats]]:
    """Causal attention over a mesh, which chooses its own index at every call.

    Args:
        mesh: axes of type Auto, among them `batch_axis` and `sequence_axes`.
        layout: the order of tokens, for as many ranks as `sequence_axes` have devices.
        pattern: how the index is chosen; None for dense attention.
        ring: how keys and values travel: "hierarchical", "flat" or "gather" (`ring_attention`).
        backend: of the kernels; None for the best that runs here.
        scale: of the logits; default 1/sqrt(D).
        recall_positions: int32 [R], global positions of queries on which `recall` is measured,
            which costs R rows of exact attention; None measures none.
        batch_axis: mesh axis of the batch.
        sequence_axes: mesh axes of the sequence, slowest first.

    Returns:
        A function `attention(q, k, v, given=None) -> (out, stats)` for use under `jax.jit`:
        q [B, S, Hq, D]; k, v [B, S, Hk, D] in layout order, rotary embedding applied; B a
        multiple of the batch axis. `given` stands in for `pattern` in this call: the
        `FixedBudget` or `Replay` of a layer, or a `VerticalSlashIndex` (global, [B, Hq, ...]) to
        use as it is. out [B, S, Hq, D] has the dtype of q. stats are fp32 scalars, means over
        batch and heads: `density`, the share of causal pairs that are computed; `executed`,
        pairs in the tiles that kernels execute, over causal pairs; `estimated_density`, with a
        `Replay` that also chooses an index, the share of causal pairs in that one; and `recall`
        when asked for, the share of the softmax mass that lies on computed pairs.

    Raises:
        UserError: if `ring` is unknown.
        ValueError: if the layout is for another number of ranks.
    """
    check_ring(ring)
    axis_sizes = tuple(mesh.shape[name] for name in sequence_axes)
    ranks = functools.reduce(int.__mul__, axis_sizes, 1)
    if ranks != layout.num_ranks:
        raise ValueError(
            f"the layout is for num_ranks={layout.num_ranks} but axes {sequence_axes} of the "
            f"mesh have {ranks} devices"
        )
    attend = functools.partial(
        ring_attention,
        layout=layout,
        axis_names=sequence_axes,
        axis_sizes=axis_sizes,
        ring=ring,
        scale=scale,
        backend=backend,
    )

    def local(q: Array, k: Array, v: Array, chosen, positions) -> tuple[Array, Stats]:
        rank = lax.axis_index(sequence_axes)
        where = dict(block_ids=layout.block_ids(rank), axis_names=sequence_axes, scale=scale)
        index, estimated = chosen, None
        choice = dict(num_blocks=layout.num_blocks, backend=backend, **where)
        if isinstance(chosen, Replay):
            index, estimated = chosen.replay_and_estimate(q, k, **choice)
        elif isinstance(chosen, Pattern):
            index = choose_index(q, k, chosen, **choice)
        stats = _cost(index, layout)
        if estimated is not None:
            share = density(estimated, layout.seq_len)
            stats["estimated_density"] = share.mean(dtype=jnp.float32)
        if positions is not None:
            stats["recall"] = jnp.float32(1)
            if index is not None:
                recall = attention_recall(q, k, index, positions, **where)
                stats["recall"] = recall.mean(dtype=jnp.float32)
        stats = lax.pmean(lax.stop_gradient(stats), batch_axis)
        return attend(q, k, v, index), stats

    heads = P(batch_axis, sequence_axes)

    def attention(
        q: Array,
        k: Array,
        v: Array,
        given: FixedBudget | Replay | VerticalSlashIndex | None = None,
    ) -> tuple[Array, Stats]:
        chosen = pattern if given is None else given
        # An index belongs to entries of the batch; budgets and positions to all of them.
        chosen_spec = P(batch_axis) if isinstance(chosen, VerticalSlashIndex) else P()
        arguments, specs = (q, k, v, chosen, recall_positions), [heads, heads, heads, chosen_spec]
        run = local
        if isinstance(chosen, VerticalSlash):  # static: not an argument of shard_map
            arguments = (q, k, v, recall_positions)
            specs = specs[:3]

            def run(q, k, v, positions):
                return local(q, k, v, chosen, positions)

        return jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(*specs, P()),
            out_specs=(heads, P()),
            check_vma=False,
        )(*arguments)

    return attention


def _cost(index: VerticalSlashIndex | None, layout: Layout) -> Stats:
    """Means over batch and heads of what an index computes and executes, over causal pairs."""
    total = float(causal_pairs(layout.seq_len))
    if index is None:
        tiles = layout.num_blocks * (layout.num_blocks + 1) // 2
        executed = tiles * layout.block_size**2 / total
        return {"density": jnp.float32(1), "executed": jnp.float32(executed)}
    executed = index.executed_pairs(layout.seq_len) / total
    return {
        "density": density(index, layout.seq_len).mean(dtype=jnp.float32),
        "executed": executed.mean(dtype=jnp.float32),
    }
