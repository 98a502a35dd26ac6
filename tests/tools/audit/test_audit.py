"""Audit metrics against their definitions in NumPy, on one device and over a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mtraining_jax.documents import Documents
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.row_attention import Keys
from mtraining_jax.tools.audit.figures import (
    GRADIENT_FIGURES,
    AuditRows,
    forward_figures,
    gradient_figures,
    starved_keys,
)
from pallas_kernels.index import BlockMaskIndex
from tests.models.common import equations
from tests.patterns import inputs
from tests.tools.audit import audit_oracle as oracle

BATCH, HEADS, KV_HEADS, DIM, BLOCK, NUM_BLOCKS = 2, 4, 2, 16, 8, 10
SEQ_LEN, SCALE = BLOCK * NUM_BLOCKS, 0.7
ROWS = AuditRows(np.array([0, 9, 30, 31, 47, 60, 77], np.int32), np.array([70, 79], np.int32))
PATTERN = VerticalSlash(
    top_p=0.5,
    max_verticals=16,
    max_slashes=4,
    num_probe_queries=8,
    block_size=BLOCK,
    sink_tokens=1,
    local_blocks=1,
    min_verticals=2,
    min_slashes=1,
)


def arrays(dtype=jnp.float32):
    q, k = inputs.random(0, BATCH, SEQ_LEN, HEADS, KV_HEADS, DIM, dtype)
    v, d_out = (
        jax.random.normal(jax.random.key(seed), (BATCH, SEQ_LEN, heads, DIM), dtype)
        for seed, heads in ((7, KV_HEADS), (8, HEADS))
    )
    # As small as gradients of a long sequence: squares underflow in fp32.
    return q, k, v, d_out * 1e-22


def measure(q, k, v, d_out, index, where, batch_axes=()):
    keys = Keys.of(k, v, index, scale=SCALE, **where)
    figures, found = forward_figures(q, ROWS, keys, batch_axes)
    of_gradient = gradient_figures(found, d_out, ROWS.everywhere, keys, batch_axes)
    return figures | dict(zip(GRADIENT_FIGURES, of_gradient.T, strict=True))


def chosen(q, k, block_ids, axis_names=()):
    return PATTERN.select(q, k, SelectionContext(block_ids, NUM_BLOCKS, axis_names)).index


@functools.cache
def on_one_device():
    blocks = jnp.arange(NUM_BLOCKS)

    @jax.jit
    def run(q, k, v, d_out):
        index = chosen(q, k, blocks)
        return measure(q, k, v, d_out, index, {"block_ids": blocks}), index

    return jax.device_get(run(*arrays()))


def close(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, **tolerance, err_msg=name)


def test_metrics_match_their_definitions():
    found, index = on_one_device()
    mask = np.asarray(index.to_mask(SEQ_LEN))
    expected = oracle.figures(*arrays(), mask, *ROWS, BLOCK, SCALE)
    close(found, expected, rtol=2e-5, atol=2e-6)
    assert (0.3 < expected["recall"]).all() and (expected["recall"] < 0.99).all()
    assert (expected["output_error"] > 0.05).all()
    assert (expected["local_gradient_cosine"] < 0.99).all()
    assert 0 < expected["starved_keys"].max() < 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_of_fp32_are_exact_on_all_devices(dtype):
    """CPUs always compute them exactly; for bf16, fewer passes are as exact."""
    index, where = on_one_device()[1], {"block_ids": jnp.arange(NUM_BLOCKS)}
    traced = jax.make_jaxpr(lambda *x: measure(*x, index, where))(*arrays(dtype))
    products = [x for x in equations(traced.jaxpr) if x.primitive.name == "dot_general"]
    exact = (jax.lax.Precision.HIGHEST,) * 2
    for product in products:
        expected = exact if product.invars[0].aval.dtype == jnp.float32 else None
        assert product.params["precision"] == expected
    assert products


def test_metrics_are_the_same_over_a_mesh():
    layout = Layout("striped", SEQ_LEN, 2, BLOCK, 1)
    order, axes = layout.permutation(), ("node", "device")
    tokens = P("data", axes)

    def local(q, k, v, d_out):
        where = {"block_ids": layout.block_ids(jax.lax.axis_index(axes)), "axis_names": axes}
        index = chosen(q, k, where["block_ids"], axes)
        return measure(q, k, v, d_out, index, where, ("data",))

    run = jax.shard_map(
        local, mesh=make_mesh(2, 1, 2), in_specs=(tokens,) * 4, out_specs=P(), check_vma=False
    )
    close(jax.jit(run)(*(x[:, order] for x in arrays())), on_one_device()[0], rtol=2e-5, atol=2e-6)


def test_metrics_within_documents_match_each_document_on_its_own():
    lengths = [[33, 21], [16, 40]]  # 5 and 3 blocks, 2 and 5; then padding
    documents = Documents.from_lengths(lengths, SEQ_LEN, BLOCK)
    rng = np.random.default_rng(3)
    blocks = np.tril(rng.random((BATCH, HEADS, NUM_BLOCKS, NUM_BLOCKS)) < 0.4)
    blocks |= np.eye(NUM_BLOCKS, dtype=bool)
    wide = blocks.repeat(BLOCK, 2).repeat(BLOCK, 3)
    bits = (blocks * (1 << np.arange(NUM_BLOCKS))).sum(-1, keepdims=True).astype(np.uint32)
    index = BlockMaskIndex(jnp.asarray(bits), NUM_BLOCKS, BLOCK)
    where = {"block_ids": jnp.arange(NUM_BLOCKS), "documents": documents}
    inputs_ = arrays()
    found = jax.jit(lambda *args: measure(*args, where))(*inputs_, index)
    expected = oracle.figures(*inputs_, wide, *ROWS, BLOCK, SCALE, lengths)
    # The last rows are padding in both sequences.
    assert np.isnan(found.pop("index_gap")).all() and np.isnan(expected.pop("index_gap")).all()
    close(found, expected, rtol=2e-5, atol=2e-6)
    assert expected["starved_mass"].min() > 0.01


def test_keys_are_processed_in_chunks(monkeypatch):
    q, k, *_ = arrays()
    index = on_one_device()[1]
    keys = Keys.of(k, None, index, block_ids=jnp.arange(NUM_BLOCKS))
    whole = starved_keys(keys, HEADS)
    monkeypatch.setattr("mtraining_jax.tools.audit.figures._QUERY_BLOCKS", 4)
    monkeypatch.setattr("mtraining_jax.tools.audit.figures._KEY_BLOCKS", 3)
    for some, expected in zip(starved_keys(keys, HEADS), whole, strict=True):
        np.testing.assert_array_equal(some, expected)


def test_rows_are_sampled_everywhere_and_at_the_end():
    rows = AuditRows.draw(jax.random.key(0), 1000, 64, last=True)
    assert rows.everywhere.shape == (48,) and rows.last.shape == (16,)
    assert np.unique(rows.everywhere).size == 48 and np.unique(rows.last).size == 16
    assert rows.last.min() >= 1000 - 64 and rows.everywhere.min() < 200
    assert max(rows.last.max(), rows.everywhere.max()) < 1000
    alone = AuditRows.draw(jax.random.key(0), 1000, 64, last=False)
    assert alone.everywhere.shape == (64,) and alone.last is None
