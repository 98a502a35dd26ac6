"""Lists per row of blocks: selection and computation of eight ranks, on one GPU.

As in `test_ring_on_one.py`, a `jax.vmap` with the names of the mesh's axes emulates the mesh.
"""

import functools

import jax
import numpy as np
import pytest

from mtraining_jax.attention.sharded import select_index
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.ring import ring_attention
from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.patterns.xattention import XAttention
from pallas_kernels.index import BlockMaskIndex
from tests.gpu import ring_problem
from tests.gpu.ring_errors import NAMES, assert_right, own_device
from tests.gpu.ring_problem import SIZE

RANKS = 8
PATTERNS = [
    XAttention(stride=8), XAttention(stride=16), SampledRows(), SampledRows(tau=0.8),
    SampledRows(columns=128), SampledRows(random_block_prob=0.1, dense_suffix_tokens=200),
]  # fmt: skip


def rows_of_ranks(layout):
    """Int32 [ranks, n]: the global number of each local block."""
    return np.stack([layout.block_ids(rank) for rank in range(RANKS)]).astype(np.int32)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.describe())
def test_eight_ranks_select_the_rows_of_one(pattern):
    choose = functools.partial(
        select_index, pattern=pattern, num_blocks=SIZE.key_blocks, backend=ring_problem.BACKEND
    )
    q, k = ring_problem.estimate_inputs()
    layouts = [Layout(kind, SIZE.seq_len, RANKS, SIZE.block_size) for kind in ("striped", "zigzag")]

    def on_rank(q, k, block_ids):
        return jax.tree.leaves(choose(q, k, block_ids=block_ids, axis_names=("device",)))

    with jax.default_device(own_device()):
        one = jax.jit(choose)(q, k, block_ids=np.arange(SIZE.key_blocks, dtype=np.int32))
        many = jax.jit(jax.vmap(on_rank, axis_name="device"))
        one = [np.asarray(x) for x in jax.tree.leaves(one)]  # bits, and marks of columns
        kept = np.bitwise_count(one[0]).sum((-1, -2))
        assert len(set(kept.ravel().tolist())) > 1  # heads differ
        for layout in layouts:
            ids = rows_of_ranks(layout)
            shape = SIZE.batch, SIZE.key_blocks, SIZE.block_size
            blocks = [x.reshape(*shape, *x.shape[2:]) for x in (q, k)]
            sharded = [np.moveaxis(x[:, ids], 1, 0) for x in blocks]
            sharded = [x.reshape(RANKS, SIZE.batch, -1, *x.shape[4:]) for x in sharded]
            for found, whole in zip(many(*sharded, ids), one, strict=True):
                for rank in range(RANKS):
                    np.testing.assert_array_equal(found[rank], whole[:, :, ids[rank]])


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(
    ("kind", "ring", "nodes"),
    [
        ("striped", "gather", 1),
        ("striped", "gather", 2),
        ("striped", "gather", 8),
        ("striped", "flat", 1),
        ("striped", "hierarchical", 2),
        ("zigzag", "gather", 1),
    ],
)
def test_rows_of_eight_ranks_match_the_lists_of_one(kind, ring, nodes, columns):
    layout = Layout(kind, SIZE.seq_len, RANKS, SIZE.block_size, nodes)
    axes = {"node": nodes, "device": RANKS // nodes} if nodes > 1 else {"device": RANKS}
    attend = functools.partial(
        ring_attention,
        layout=layout,
        axis_names=tuple(axes),
        ring=ring,
        backend=ring_problem.BACKEND,
    )

    index = ring_problem.mask_index()
    if not columns:
        index = BlockMaskIndex(index.bits, SIZE.key_blocks, SIZE.block_size)

    def on_rank(q, k, v, dout, index):
        out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, index), q, k, v)
        return out, *vjp(dout)

    on_all = on_rank
    for name in reversed(axes):
        on_all = jax.vmap(on_all, axis_name=name)
    order, inverse = layout.permutation(), layout.inverse()

    def split(x, axis=1):  # [B, S, ...] -> [*axes, B, n, ...]
        x = np.moveaxis(np.asarray(x), axis, 0)
        x = np.moveaxis(x.reshape(*axes.values(), -1, *x.shape[1:]), len(axes), len(axes) + axis)
        return jax.device_put(x, own_device())

    def collect(x):
        x = np.moveaxis(np.asarray(x), len(axes), 0)
        return x.reshape(SIZE.batch, SIZE.seq_len, *x.shape[-2:])[:, inverse]

    rows = rows_of_ranks(layout).reshape(-1)
    with jax.default_device(own_device()):
        inputs = [split(x[:, order]) for x in ring_problem.inputs()]
        sharded = jax.tree.map(lambda x: split(np.asarray(x)[:, :, rows], 2), index)
        arrays = jax.jit(on_all)(*inputs, sharded)
    found = dict(zip(NAMES, map(collect, arrays), strict=True))
    name = "columns" if columns else "blocks"
    assert_right(f"rows and {name} of {RANKS} ranks on one, {kind} {ring} in {nodes}", found, name)
