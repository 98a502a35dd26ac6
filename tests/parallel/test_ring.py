"""Ring attention against the oracle: output and all gradients, for all meshes and layouts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import HEADS, make_mesh
from mtraining_jax.parallel.ring import ring_attention
from pallas_kernels import head_loop
from pallas_kernels.index import DenseIndex, TokenChunksIndex
from pallas_kernels.reference import reference_attention
from tests.parallel import indices

NAMES = "out", "dq", "dk", "dv"
INDICES = {"sparse": indices.sparse, "dense": indices.dense, "blocks": indices.blocks}
INDICES["rows"] = indices.bits_and_columns
INDICES["documents"] = indices.dense_documents
INDICES["whole"] = lambda: DenseIndex(indices.BLOCK_SIZE)
ROWS = P("data", None, ("node", "device"))  # each rank holds the rows of its own blocks
# Each way in which keys reach a rank, and each kind of index once: tests/pallas_kernels/test_shards
# has every kind with every layout. An axis of 4 has steps between the first and the last.
# Those that are slow have their way and their kind in other cases, or recorded in tests/golden.
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
CASES = [
    ((1, 1, 1), "striped", "hierarchical", "sparse"),
    ((1, 4, 2), "striped", "hierarchical", "sparse dense"),
    SLOW((1, 2, 4), "striped", "hierarchical", "rows"),
    ((1, 1, 4), "zigzag", "flat", "sparse"),
    ((1, 2, 4), "striped", "flat", "whole"),
    SLOW((2, 2, 2), "zigzag", "gather", "sparse dense"),
    ((1, 4, 2), "contiguous", "gather", "blocks"),
    ((1, 4, 2), "striped", "gather", "sparse dense"),
    SLOW((1, 2, 4), "striped", "gather", "rows"),
    ((1, 1, 8), "striped", "gather", "documents"),
    ((1, 2, 1), "striped", "gather", "blocks"),  # a node of one device has nothing to gather
]


@jax.jit
def oracle(q, k, v, dout, mask):
    out, vjp = jax.vjp(lambda q, k, v: reference_attention(q, k, v, mask)[0], q, k, v)
    return out, *vjp(dout)


@functools.cache
def expected(name):
    return oracle(*indices.inputs(), INDICES[name]().to_mask(indices.SEQ_LEN))


def layout_of(mesh, kind, ring):
    _, nodes, devices = mesh
    spread = 1 if ring == "flat" else nodes
    return Layout(kind, indices.SEQ_LEN, nodes * devices, indices.BLOCK_SIZE, spread)


@functools.cache  # some tests compare with results of others
def compile_ring(mesh, kind, ring, sharded_by_query=False, dtype=jnp.float32):
    """Returns a function of an index -> (out, dq, dk, dv) in sequence order."""
    layout = layout_of(mesh, kind, ring)

    def local(q, k, v, dout, index):
        attend = functools.partial(ring_attention, layout=layout, ring=ring)
        out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, index), q, k, v)
        return out, *vjp(dout)

    sharded = jax.shard_map(
        local,
        mesh=make_mesh(*mesh),
        in_specs=(*[HEADS] * 4, ROWS if sharded_by_query else P("data")),
        out_specs=HEADS,
        check_vma=False,
    )
    # Reordered with NumPy; JAX would compile a program for each shape.
    arrays = [np.asarray(x)[:, layout.permutation()] for x in indices.inputs(dtype=dtype)]
    compiled = jax.jit(sharded)
    return lambda index: [np.asarray(x)[:, layout.inverse()] for x in compiled(*arrays, index)]


def index_of(name, mesh, kind, ring):
    if name != "rows":
        return INDICES[name]()
    order = layout_of(mesh, kind, ring).permutation()[:: indices.BLOCK_SIZE] // indices.BLOCK_SIZE
    return indices.bits_and_columns(jnp.asarray(order))


def check(results, name):
    for what, result, wanted in zip(NAMES, results, expected(name), strict=True):
        np.testing.assert_allclose(result, wanted, rtol=2e-5, atol=2e-5, err_msg=f"{name} {what}")


def test_the_sparse_index_has_the_intended_sparsity():
    mask = np.asarray(indices.sparse().to_mask(indices.SEQ_LEN))
    causal_pairs = indices.SEQ_LEN * (indices.SEQ_LEN + 1) / 2
    density = mask.sum((-1, -2)) / causal_pairs
    assert 0.02 < density.mean() < 0.2
    assert density.min() == 0 and (~mask.any(-1)).any((0, 1)).sum() > 100  # empty head, empty rows


@pytest.mark.parametrize(("mesh", "kind", "ring", "names"), CASES)
def test_a_mesh_gives_the_results_of_one_device(mesh, kind, ring, names):
    run = compile_ring(mesh, kind, ring, names == "rows")
    for name in names.split():
        check(run(index_of(name, mesh, kind, ring)), name)


def errors_of_bf16(mesh, ring):
    """Root mean square errors of each result of a dense index."""
    rounded = (x.astype(jnp.float32) for x in indices.inputs(dtype=jnp.bfloat16))
    wanted = oracle(*rounded, indices.dense().to_mask(indices.SEQ_LEN))
    results = compile_ring(mesh, "striped", ring, dtype=jnp.bfloat16)(INDICES["whole"]())
    assert {x.dtype for x in results} == {jnp.dtype(jnp.bfloat16)}
    return [
        float(np.sqrt(np.mean((x.astype(np.float32) - np.asarray(y)) ** 2)))
        for x, y in zip(results, wanted, strict=True)
    ]


def test_a_bf16_ring_accumulates_in_fp32_between_steps():
    # If the running output were rounded in each step, the error would grow with the ring.
    alone, many = errors_of_bf16((1, 1, 1), "flat"), errors_of_bf16((1, 4, 2), "gather")
    assert all(x <= 1.1 * one for x, one in zip(many, alone, strict=True))


@pytest.mark.parametrize(("devices", "name"), [((1, 8), "documents"), SLOW((2, 4), "rows")])
def test_heads_one_after_another_give_bit_identical_results(devices, name, monkeypatch):
    how = (1, *devices), "striped", "gather"
    index = index_of(name, *how)
    expected = compile_ring(*how, name == "rows")(index)  # the programs of CASES
    monkeypatch.setattr(head_loop, "_PART_BYTES", 1)
    in_parts = compile_ring.__wrapped__(*how, name == "rows")(index)
    for what, x, y in zip(NAMES, in_parts, expected, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=f"{name} {what}")


def test_an_index_has_no_gradient():
    q, k, v, dout = indices.inputs()
    layout = Layout("striped", indices.SEQ_LEN, 1, indices.BLOCK_SIZE)
    attend = functools.partial(ring_attention, layout=layout, axis_names=())

    def gradients(q, k, v, index, dout):
        return jax.vjp(attend, q, k, v, index)[1](dout)

    *grads, index_grad = jax.eval_shape(gradients, q, k, v, indices.sparse(), dout)
    assert [x.dtype for x in grads] == [jnp.float32] * 3
    assert {x.dtype for x in jax.tree.leaves(index_grad)} == {jax.dtypes.float0}


def _chunks():
    bits = jnp.zeros((indices.BATCH, indices.HEADS, indices.NUM_BLOCKS, 8, 1), jnp.uint32)
    return TokenChunksIndex(bits, indices.NUM_BLOCKS, 4, 2, indices.BLOCK_SIZE)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layout": Layout("striped", 512, 1, 8)}, "q has shape .*; .* .batch, 512, heads"),
        ({"layout": Layout("striped", 256, 1, 16)}, "block_size=8 but the layout has 16"),
        ({"layout": Layout("striped", 256, 2, 8)}, "product 1, but the layout has num_ranks=2"),
        ({"ring": "round"}, "ring='round' is unknown; it must be one of"),
        ({"index": lambda: DenseIndex(8, causal=False)}, "is causal, but the index is not"),
        ({"index": _chunks}, "a TokenChunksIndex cannot be expressed as tiles; use"),
    ],
)
def test_invalid_arguments_raise(change, sentence):
    q, k, v, _ = indices.inputs()
    options = {"layout": Layout("striped", 256, 1, 8), "axis_names": ()} | change
    index = options.pop("index", indices.sparse)()
    with pytest.raises(ValueError, match=sentence):
        ring_attention(q, k, v, index, **options)
