"""Order of transfers and kernels, read from the traced program; numerics cannot show it."""

import collections
import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import HEADS, make_mesh
from mtraining_jax.parallel.ring import RingTopology, ring_attention
from tests.parallel import indices, traced_kernels
from tests.parallel.traced_kernels import KERNELS

COLLECTIVES = ("ppermute", "all_gather", "reduce_scatter", "psum")
FLAT, NESTED, GATHER = "flat", "hierarchical", "gather"
MESHES = [(1, 8, FLAT), (2, 4, FLAT), (2, 4, NESTED), (4, 2, NESTED), (8, 1, NESTED)]


def layout_of(nodes, devices, ring, kind="striped"):
    spread = 1 if ring == FLAT else nodes
    return Layout(kind, indices.SEQ_LEN, nodes * devices, indices.BLOCK_SIZE, spread)


@functools.cache
def traced(nodes, devices, ring, differentiate, dq_apart=False):
    """With `dq_apart` a backward call is two kernels, as in the mosaic_gpu backend."""
    traced_kernels.register()
    attend = functools.partial(
        ring_attention,
        layout=layout_of(nodes, devices, ring),
        ring=ring,
        backend="traced_dq_apart" if dq_apart else "traced",
    )

    def local(q, k, v, dout, index):
        if not differentiate:
            return attend(q, k, v, index)
        return jax.vjp(lambda q, k, v: attend(q, k, v, index), q, k, v)[1](dout)

    sharded = jax.shard_map(
        local,
        mesh=make_mesh(1, nodes, devices),
        in_specs=(*[HEADS] * 4, P("data")),
        out_specs=HEADS,
        check_vma=False,
    )
    return jax.make_jaxpr(sharded)(*indices.inputs(), indices.sparse()).jaxpr


def inner_jaxprs(eqn):
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else [value]:
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def walk(jaxpr, times=1):
    """Yields every nested jaxpr with its number of executions."""
    yield jaxpr, times
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            yield from walk(inner, times * length)


def is_kernel(eqn):
    inside = (e for inner in inner_jaxprs(eqn) for jaxpr, _ in walk(inner) for e in jaxpr.eqns)
    return any(e.params.get("name") in KERNELS for e in (eqn, *inside))


def is_transfer(eqn, names=("ppermute",)):
    return eqn.primitive.name in names


def exposed_transfers(jaxpr, names=("ppermute",)):
    """Counts the transfers of one jaxpr that no concurrent kernel could hide.

    A kernel can hide a transfer if neither depends on the other.
    """
    producer, needs = {}, []
    for number, eqn in enumerate(jaxpr.eqns):
        direct = {producer[v] for v in eqn.invars if not hasattr(v, "val") and v in producer}
        needs.append(direct.union(*(needs[i] for i in direct)))
        producer |= dict.fromkeys(eqn.outvars, number)
    kernels = [number for number, eqn in enumerate(jaxpr.eqns) if is_kernel(eqn)]
    return [
        eqn
        for number, eqn in enumerate(jaxpr.eqns)
        if is_transfer(eqn, names)
        and all(kernel in needs[number] or number in needs[kernel] for kernel in kernels)
    ]


@pytest.mark.parametrize(
    ("nodes", "devices", "ring", "ways_home"),
    [
        # A flat ring, or a ring of nodes: the last hop of dk and dv.
        (1, 8, FLAT, 1),
        (2, 4, FLAT, 1),
        (8, 1, NESTED, 1),
        # The last hop inside the node and the one between nodes.
        (2, 4, NESTED, 2),
        # The last hop inside the node in each of four outer steps, and the one between nodes.
        (4, 2, NESTED, 5),
    ],
)
def test_every_transfer_but_the_last_hop_of_gradients_can_overlap_a_kernel(
    nodes, devices, ring, ways_home
):
    def exposed(differentiate):
        return sum(
            times * len(exposed_transfers(jaxpr))
            for jaxpr, times in walk(traced(nodes, devices, ring, differentiate))
        )

    assert exposed(False) == 0
    assert exposed(True) == 2 * ways_home


@pytest.mark.parametrize("differentiate", [False, True])
def test_transfers_in_a_ring_loop_start_at_the_top(differentiate):
    # Operands of a transfer are inputs of the loop body: no equation precedes it.
    found = 0
    for jaxpr, _ in walk(traced(1, 8, FLAT, differentiate)):
        for eqn in jaxpr.eqns:
            body = eqn.params["jaxpr"].jaxpr if eqn.primitive.name == "scan" else None
            if body is not None and any(map(is_transfer, body.eqns)):
                sent = {v for e in body.eqns if is_transfer(e) for v in e.invars}
                assert sent <= set(body.invars) and is_kernel(eqn)
                found += len(sent)
    assert found == (2 + 4 if differentiate else 2)  # k, v forward; k, v, dk, dv backward


@pytest.mark.parametrize(("nodes", "devices", "ring"), MESHES)
def test_the_number_of_hops_is_minimal(nodes, devices, ring):
    def hops(differentiate):
        return sum(
            times * sum(map(is_transfer, jaxpr.eqns))
            for jaxpr, times in walk(traced(nodes, devices, ring, differentiate))
        )

    ranks = nodes * devices
    forward, backward = hops(False), hops(True) - hops(False)
    # Keys and values visit every rank but their own.
    assert forward == 2 * (ranks - 1)
    # Their gradients also travel home: once around the ring, or around each ring of the hierarchy.
    home = ranks
    if ring == NESTED:
        home = nodes * devices * (devices > 1) + nodes * (nodes > 1)
    assert backward == 2 * (ranks - 1) + 2 * home


def collectives(nodes, devices, differentiate):
    """Counts the executions of each collective in a gather ring."""
    counts = collections.Counter()
    for jaxpr, times in walk(traced(nodes, devices, GATHER, differentiate)):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in COLLECTIVES:
                counts[eqn.primitive.name] += times
    return counts


@pytest.mark.parametrize(("nodes", "devices"), [(1, 8), (2, 4), (4, 2)])
def test_gathering_moves_each_shard_once_between_nodes(nodes, devices):
    forward = collectives(nodes, devices, False)
    backward = collectives(nodes, devices, True) - forward
    # Keys and values are gathered on every node and forwarded between nodes. Columns come from
    # the gathered keys; those of other nodes from one sum.
    assert forward["all_gather"] == 2 * nodes and forward["ppermute"] == 2 * (nodes - 1)
    assert backward["all_gather"] == backward["reduce_scatter"] == 2 * nodes
    home = nodes if nodes > 1 else 0
    assert backward["ppermute"] == 2 * (nodes - 1) + 2 * home
    # Keys and values of the columns; in the backward pass their gradients too.
    sums = 0 if nodes == 1 else 2
    assert forward["psum"] == sums and backward["psum"] == 2 * sums


@pytest.mark.parametrize(("nodes", "devices"), [(1, 8), (4, 2)])
@pytest.mark.parametrize("differentiate", [False, True])
def test_the_gather_and_returning_gradients_overlap_kernels(nodes, devices, differentiate):
    # The gather overlaps work on the rank's own keys or on the previous node's. Returning
    # gradients overlap dq, which no transfer depends on.
    jaxpr = traced(nodes, devices, GATHER, differentiate, dq_apart=True)
    for inner, _ in walk(jaxpr):
        assert not exposed_transfers(inner, COLLECTIVES)


@pytest.mark.parametrize("ring", [FLAT, NESTED, GATHER])
def test_the_backward_pass_reuses_the_forward_plans(ring):
    backend = traced_kernels.register()

    def plans(differentiate):
        before = backend.planned
        traced.__wrapped__(2, 4, ring, differentiate)
        return backend.planned - before

    assert plans(True) == plans(False) > 0


@pytest.mark.parametrize(("nodes", "devices", "ring"), [*MESHES, (2, 4, GATHER), (8, 1, GATHER)])
def test_a_ring_visits_all_keys_once(nodes, devices, ring):
    topology = RingTopology(
        layout_of(nodes, devices, ring), ("node", "device"), (nodes, devices), ring
    )
    steps = list(np.ndindex(*(axis.size for axis in topology.rotating)))
    for rank in range(8):
        visits = [topology.sources(rank, *step).tolist() for step in steps]
        assert sorted(sum(visits, [])) == list(range(8))
        assert rank in visits[0]
