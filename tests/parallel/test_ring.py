"""The ring against the oracle: output and all gradients, whatever the mesh and the layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import HEADS, make_mesh
from mtraining_jax.parallel.ring import ring_attention
from pallas_kernels.index import DenseIndex
from pallas_kernels.reference import mask_from_index, reference_attention
from tests.parallel import indices

INDICES = {"sparse": indices.sparse, "dense": indices.dense}


@jax.jit
def oracle(q, k, v, dout, mask):
    out, vjp = jax.vjp(lambda q, k, v: reference_attention(q, k, v, mask)[0], q, k, v)
    return out, *vjp(dout)


@functools.cache
def expected(name):
    return oracle(*indices.inputs(), mask_from_index(INDICES[name](), indices.SEQ_LEN))


def compile_ring(nodes, devices, kind, ring, dtype=jnp.float32, data=1):
    """A function of an index -> (out, dq, dk, dv) in global order."""
    mesh = make_mesh(data, nodes, devices)
    spread = 1 if ring == "flat" else nodes
    layout = Layout(kind, indices.SEQ_LEN, nodes * devices, indices.BLOCK_SIZE, spread)

    def local(q, k, v, dout, index):
        attend = functools.partial(ring_attention, layout=layout, ring=ring)
        out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, index), q, k, v)
        return out, *vjp(dout)

    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(*[HEADS] * 4, P("data")), out_specs=HEADS, check_vma=False
    )
    arrays = [x[:, layout.permutation()] for x in indices.inputs(dtype=dtype)]
    compiled = jax.jit(sharded)
    return lambda index: [x[:, layout.inverse()] for x in compiled(*arrays, index)]


def check(results, name):
    names = "out", "dq", "dk", "dv"
    for what, result, wanted in zip(names, results, expected(name), strict=True):
        np.testing.assert_allclose(result, wanted, rtol=2e-5, atol=2e-5, err_msg=f"{name} {what}")


def test_the_sparse_index_is_really_sparse():
    mask = np.asarray(mask_from_index(indices.sparse(), indices.SEQ_LEN))
    causal_pairs = indices.SEQ_LEN * (indices.SEQ_LEN + 1) / 2
    density = mask.sum((-1, -2)) / causal_pairs
    assert 0.02 < density.mean() < 0.2
    assert density.min() == 0 and (~mask.any(-1)).any((0, 1)).sum() > 100  # empty head, empty rows


FACTORISATIONS = [(n, w // n) for w in (1, 2, 4, 8) for n in (1, 2, 4, 8) if n <= w]


MESHES = [
    *((*mesh, "hierarchical") for mesh in FACTORISATIONS),
    *((*mesh, "gather") for mesh in FACTORISATIONS if mesh[1] > 1),
]


@pytest.mark.parametrize(("nodes", "devices", "ring"), MESHES)
def test_striped_on_every_mesh(nodes, devices, ring):
    data = 2 if nodes * devices == 4 else 1
    run = compile_ring(nodes, devices, "striped", ring, data=data)
    for name, index in INDICES.items():
        check(run(index()), name)


@pytest.mark.parametrize(
    ("nodes", "devices", "kind", "ring"),
    [
        (2, 4, "striped", "flat"),
        (1, 1, "zigzag", "flat"),
        (2, 1, "zigzag", "flat"),
        (2, 2, "zigzag", "hierarchical"),
        (4, 2, "zigzag", "flat"),
        (1, 2, "contiguous", "hierarchical"),
        (1, 4, "zigzag", "gather"),
        (2, 2, "zigzag", "gather"),
        (4, 2, "contiguous", "gather"),
    ],
)
def test_every_layout_and_ring(nodes, devices, kind, ring):
    run = compile_ring(nodes, devices, kind, ring)
    for name, index in INDICES.items():
        check(run(index()), name)


@pytest.mark.parametrize(
    ("nodes", "devices", "kind", "ring"),
    [
        (2, 2, "striped", "hierarchical"),
        (1, 4, "striped", "flat"),
        (2, 1, "zigzag", "flat"),
        (1, 4, "striped", "gather"),
        (2, 2, "striped", "gather"),
        (1, 2, "zigzag", "gather"),
    ],
)
def test_a_dense_index_is_dense_causal(nodes, devices, kind, ring):
    check(compile_ring(nodes, devices, kind, ring)(DenseIndex(indices.BLOCK_SIZE)), "dense")


@pytest.mark.parametrize(("mesh", "ring"), [((1, 8), "flat"), ((4, 2), "gather")])
def test_accumulation_stays_fp32_between_the_steps_of_a_bf16_ring(mesh, ring):
    # Rounding the running output once a step would make the error grow with the ring.
    mask = mask_from_index(indices.dense(), indices.SEQ_LEN)
    rounded = (x.astype(jnp.float32) for x in indices.inputs(dtype=jnp.bfloat16))
    wanted = oracle(*rounded, mask)

    def errors(nodes, devices):
        run = compile_ring(nodes, devices, "striped", ring, dtype=jnp.bfloat16)
        results = run(DenseIndex(indices.BLOCK_SIZE))
        assert {x.dtype for x in results} == {jnp.dtype(jnp.bfloat16)}
        return [
            float(jnp.sqrt(jnp.mean((x.astype(jnp.float32) - y) ** 2)))
            for x, y in zip(results, wanted, strict=True)
        ]

    alone, many = errors(1, 1), errors(*mesh)
    assert all(x <= 1.1 * one for x, one in zip(many, alone, strict=True))


def test_an_index_gets_no_gradient():
    q, k, v, dout = indices.inputs()
    layout = Layout("striped", indices.SEQ_LEN, 1, indices.BLOCK_SIZE)
    attend = functools.partial(ring_attention, layout=layout, axis_names=())

    def gradients(q, k, v, index, dout):
        return jax.vjp(attend, q, k, v, index)[1](dout)

    *grads, index_grad = jax.eval_shape(gradients, q, k, v, indices.sparse(), dout)
    assert [x.dtype for x in grads] == [jnp.float32] * 3
    assert {x.dtype for x in jax.tree.leaves(index_grad)} == {jax.dtypes.float0}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layout": Layout("striped", 512, 1, 8)}, "q has shape .*: .batch, 512, heads, dim."),
        ({"layout": Layout("striped", 256, 1, 16)}, "block_size=8 but the layout 16"),
        ({"layout": Layout("striped", 256, 2, 8)}, "product 1 but the layout is for num_ranks=2"),
        ({"axis_sizes": (1,)}, "axis_sizes=.1,. must be equally long"),
        ({"ring": "round"}, "ring='round' is unknown; it must be one of"),
    ],
)
def test_what_does_not_fit_is_refused(change, sentence):
    q, k, v, _ = indices.inputs()
    options = {"layout": Layout("striped", 256, 1, 8), "axis_names": ()} | change
    with pytest.raises(ValueError, match=sentence):
        ring_attention(q, k, v, indices.sparse(), **options)
