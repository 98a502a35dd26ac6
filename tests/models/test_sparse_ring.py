"""The model with real sparse attention: index and ring inside `shard_map`."""

import collections

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mtraining_jax.attention.sharded import select_index
from mtraining_jax.models.transformer import abstract_state, graph_definition
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import HEADS, SEQUENCE_AXES, make_mesh
from mtraining_jax.parallel.ring import ring_attention
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from tests.models.common import equations, tiny_spec

BLOCK, LENGTH = 16, 128
WORDS = ("ppermute", "sort", "psum", "exp")


@pytest.fixture(scope="module")
def traces():
    """The traced gradient of each remat policy."""
    mesh = make_mesh(1, 2, 1)
    layout = Layout("striped", LENGTH, num_ranks=2, block_size=BLOCK, nodes=2)
    pattern = VerticalSlash(
        top_p=0.5,
        max_verticals=16,
        max_slashes=32,
        num_probe_queries=BLOCK,
        block_size=BLOCK,
        sink_tokens=2,
        min_verticals=2,
        min_slashes=2,
    )

    def local(q, k, v):
        ids = layout.block_ids(jax.lax.axis_index(SEQUENCE_AXES))
        where = {"block_ids": ids, "num_blocks": LENGTH // BLOCK, "axis_names": SEQUENCE_AXES}
        index = select_index(q, k, pattern, **where)
        return ring_attention(q, k, v, index, layout=layout)

    def attention(q, k, v):
        specs = {"in_specs": (HEADS,) * 3, "out_specs": HEADS, "check_vma": False}
        return jax.shard_map(local, mesh=mesh, **specs)(q, k, v), {}

    positions = jnp.asarray(layout.permutation(), jnp.int32)
    result = {}
    for remat in ("none", "attention", "full"):
        spec = tiny_spec(num_layers=2, remat=remat)
        graphdef, state = graph_definition(spec), abstract_state(spec)
        tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)

        def loss(state, tokens, graphdef=graphdef):
            model = nnx.merge(graphdef, state)
            hidden, _ = model(tokens, positions, attention, mesh=mesh)
            return (hidden * jnp.arange(hidden.shape[-1])).mean()

        result[remat] = jax.jit(jax.grad(loss)).trace(state, tokens)
    return result


# On one device: test_layers_under_scan_and_remat_with_a_policy_match_a_plain_loop.
@pytest.mark.slow
def test_remat_by_name_recomputes_neither_index_nor_ring(traces):
    def counts(remat):
        # Transfers of the ring, ordering and sums of the index, and the kernels' softmax.
        names = collections.Counter(e.primitive.name for e in equations(traces[remat].jaxpr))
        return {word: names[word] for word in WORDS}

    def without_sorts(remat):
        return {word: count for word, count in counts(remat).items() if word != "sort"}

    kept, full = counts("attention"), counts("full")
    assert without_sorts("attention") == without_sorts("none")
    assert all(count > counts("none")[word] > 0 for word, count in full.items())
    # Sorts of index tiles are recomputed, because keeping the lists of all layers takes memory; the
    # sorts that select the index are not.
    assert counts("none")["sort"] <= kept["sort"] < full["sort"]
