"""An index of which each rank holds its own rows: the same results as on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax import SampledRows, inspect, sequence_layout, sparse_attention, stripe, unstripe
from mtraining_jax.attention.sharded import make_attention
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import make_mesh
from pallas_kernels.index import BlockMaskIndex
from tests.parallel import indices

PATTERN = SampledRows(tau=0.6, sampled_rows=2, block_size=indices.BLOCK_SIZE)


@functools.cache
def alone():
    """Output and index of one device."""
    q, k, v, _ = indices.inputs()
    return sparse_attention(q, k, v, pattern=PATTERN, return_index=True)


def test_users_get_and_give_rows_in_the_order_of_the_sequence():
    mesh = make_mesh(1, 1, 4)
    layout = sequence_layout(indices.SEQ_LEN, mesh, block_size=indices.BLOCK_SIZE)
    attend = functools.partial(sparse_attention, mesh=mesh, layout=layout, return_index=True)
    qkv = [stripe(x, layout) for x in indices.inputs()[:3]]
    expected, of_one = alone()
    out, index = attend(*qkv, pattern=PATTERN)
    assert isinstance(index, BlockMaskIndex)
    np.testing.assert_array_equal(index.bits, of_one.bits)
    np.testing.assert_allclose(unstripe(out, layout), expected, rtol=2e-5, atol=2e-5)
    again, same = attend(*qkv, pattern=of_one)
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(same.bits, of_one.bits)
    with pytest.raises(ValueError, match="a BlockMaskIndex cannot be cut into: use ring='gather'"):
        attend(*qkv, pattern=PATTERN, ring="hierarchical")


def test_statistics_count_the_rows_of_all_ranks():
    q, k, v, _ = indices.inputs()
    _, index = alone()
    rows = [0, 100, 200, 255]
    found = inspect(index, q, k, rows=rows)
    layout = Layout("striped", indices.SEQ_LEN, 4, indices.BLOCK_SIZE, 2)
    positions = jnp.array(rows, jnp.int32)
    attention = make_attention(make_mesh(2, 2, 2), layout, PATTERN, recall_positions=positions)
    order = layout.permutation()
    _, stats = jax.jit(attention)(*(x[:, order] for x in (q, k, v)))
    for name in ("density", "executed", "recall"):
        assert stats[name] == pytest.approx(getattr(found, name).mean(), rel=1e-6), name
    assert stats["recall_worst"] == pytest.approx(found.recall.min(), rel=1e-6)
