"""The computation of eight ranks on one GPU: their kernel calls, one after another.

A `jax.vmap` with the names of the mesh's axes emulates the mesh: it includes every collective,
every rank's work list and every kernel call, and the arithmetic is that of eight GPUs except for
the order of sums over ranks. It cannot show when data is transferred.
"""

import functools

import jax
import numpy as np
import pytest

from mtraining_jax.attention.sharded import select_index
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.ring import ring_attention
from tests.gpu import ring_problem
from tests.gpu.ring_errors import INDICES, LISTS, NAMES, assert_right, own_device
from tests.gpu.ring_problem import SIZE

RANKS = 8
# Layout, ring and nodes.
CASES = [
    ("striped", "gather", 1),
    ("striped", "gather", 2),
    ("striped", "hierarchical", 2),
    ("striped", "flat", 1),
    ("zigzag", "gather", 1),
    ("zigzag", "flat", 1),
]


@pytest.mark.parametrize(("kind", "ring", "nodes"), CASES)
def test_output_and_gradients_of_eight_ranks_match_one(kind, ring, nodes):
    check(kind, ring, nodes, INDICES)


@pytest.mark.parametrize(("kind", "ring", "nodes"), CASES)
def test_block_lists_of_eight_ranks_match_one(kind, ring, nodes):
    check(kind, ring, nodes, LISTS)


def check(kind, ring, nodes, indices):
    """Runs one program on some indices and compares with the oracle and with one device."""
    layout = Layout(kind, SIZE.seq_len, RANKS, SIZE.block_size, 1 if ring == "flat" else nodes)
    axes = {"node": nodes, "device": RANKS // nodes} if nodes > 1 else {"device": RANKS}
    attend = functools.partial(
        ring_attention,
        layout=layout,
        axis_names=tuple(axes),
        ring=ring,
        backend=ring_problem.BACKEND,
    )

    def on_rank(q, k, v, dout, index):
        out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, index), q, k, v)
        return out, *vjp(dout)

    on_all = on_rank
    for name in reversed(axes):
        on_all = jax.vmap(on_all, in_axes=(0, 0, 0, 0, None), axis_name=name)
    order, inverse = layout.permutation(), layout.inverse()

    def split(x):  # [B, S, H, D] -> [*axes, B, n, H, D]
        x = x[:, order].reshape(SIZE.batch, *axes.values(), -1, *x.shape[2:])
        return jax.device_put(np.moveaxis(x, 0, len(axes)), own_device())

    def collect(x):
        x = np.moveaxis(np.asarray(x), len(axes), 0)
        return x.reshape(SIZE.batch, SIZE.seq_len, *x.shape[-2:])[:, inverse]

    run = jax.jit(on_all)
    for name, index in indices.items():
        with jax.default_device(own_device()):
            arrays = run(*map(split, ring_problem.inputs()), index())
        found = dict(zip(NAMES, map(collect, arrays), strict=True))
        assert_right(f"{RANKS} ranks on one, {kind} {ring} in {nodes}", found, name)


@pytest.mark.parametrize("kind", ["striped", "zigzag"])
def test_selection_of_eight_ranks_is_bit_identical_to_one(kind):
    choose = functools.partial(
        select_index,
        pattern=ring_problem.PATTERN,
        num_blocks=SIZE.key_blocks,
        backend=ring_problem.BACKEND,
    )
    q, k = ring_problem.estimate_inputs()
    layout = Layout(kind, SIZE.seq_len, RANKS, SIZE.block_size)
    ids = np.stack([layout.block_ids(rank) for rank in range(RANKS)]).astype(np.int32)
    blocks = [x.reshape(SIZE.batch, SIZE.key_blocks, SIZE.block_size, *x.shape[2:]) for x in (q, k)]
    per_rank = [np.moveaxis(x[:, ids], 1, 0) for x in blocks]
    per_rank = [x.reshape(RANKS, SIZE.batch, -1, *x.shape[4:]) for x in per_rank]

    def on_rank(q, k, block_ids):
        return choose(q, k, block_ids=block_ids, axis_names=("device",))

    with jax.default_device(own_device()):
        one = jax.jit(choose)(q, k, block_ids=np.arange(SIZE.key_blocks, dtype=np.int32))
        many = jax.jit(jax.vmap(on_rank, axis_name="device"))(*per_rank, ids)
    assert len(set(np.asarray(one.vertical_count).ravel().tolist())) > 1  # heads differ
    for x, y in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        for rank in range(RANKS):
            assert np.asarray(x[rank]).tobytes() == np.asarray(y).tobytes()
