"""`sparse_attention` over user-defined meshes: equal to one device, whatever the axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax import (
    Dense,
    FixedBudget,
    Layout,
    SampledRows,
    Sharding,
    sequence_layout,
    sparse_attention,
    stripe,
    unstripe,
)
from tests.attention.inputs import BLOCK, HEADS, PATTERN, TOKENS, inputs, with_lse, with_residuals

# Compiles in half of the time of `PATTERN`.
ROWS = SampledRows(tau=0.6, probe_queries_per_block=4, block_size=BLOCK)
BUDGET = FixedBudget(
    verticals=np.array([0, 5, 20, 9, 6, 2], np.int32),
    slashes=np.array([30, 3, 0, 12, 6, 2], np.int32),
    max_verticals=24, max_slashes=32, num_probe_queries=BLOCK, block_size=BLOCK,
    sink_tokens=2, sliding_window=4,
)  # fmt: skip


def make_mesh(shape, names, axis_type=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))


@functools.cache
def alone(name="top_p"):
    """Returns out, lse and index of one device."""
    patterns = {"top_p": PATTERN, "fixed": BUDGET, "dense": Dense(block_size=BLOCK)}
    attend = functools.partial(with_residuals, pattern=patterns[name])
    return jax.device_get(jax.jit(attend)(*inputs()))


def gradients(attend, q, k, v, dout, dlse):
    results, pullback = jax.vjp(attend, q, k, v)
    return results, pullback((dout, dlse))


@functools.cache
def cotangents():
    rng = np.random.default_rng(7)
    q = inputs()[0]
    dout, dlse = rng.normal(size=q.shape), rng.normal(size=(q.shape[0], HEADS, TOKENS))
    return jnp.asarray(dout, q.dtype), jnp.asarray(dlse, jnp.float32)


@functools.cache
def alone_with_gradients():
    attend = functools.partial(with_lse, pattern=ROWS)
    return jax.device_get(jax.jit(functools.partial(gradients, attend))(*inputs(), *cotangents()))


def assert_close(actual, wanted, rtol=2e-5, atol=2e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol),
        jax.device_get(actual),
        wanted,
    )


def test_batch_and_sequence_over_user_axes():
    # The mesh also has an unused axis, "spare".
    mesh = make_mesh((2, 2, 2, 1), ("rows", "outer", "inner", "spare"), AxisType.Explicit)
    axes = ("outer", "inner")
    layout = sequence_layout(TOKENS, mesh, sequence=axes, block_size=BLOCK)
    attend = functools.partial(
        with_lse, pattern=ROWS, sharding=Sharding(mesh, axes, "rows", order=layout)
    )
    place = functools.partial(jax.device_put, device=NamedSharding(mesh, P("rows", axes)))
    q, k, v, dout = (place(stripe(x, layout)) for x in (*inputs(), cotangents()[0]))
    dlse = jax.device_put(
        stripe(cotangents()[1], layout, axis=2), NamedSharding(mesh, P("rows", None, axes))
    )

    with jax.set_mesh(mesh):
        step = jax.jit(functools.partial(gradients, attend))
        (out, lse), grads = step(q, k, v, dout, dlse)
    assert all(x.sharding.is_equivalent_to(q.sharding, 4) for x in (out, *grads))
    results = unstripe(out, layout), unstripe(lse, layout, axis=2)
    assert_close((results, unstripe(grads, layout)), alone_with_gradients(), rtol=1e-4, atol=1e-4)


def test_contiguous_order_on_one_axis_needs_no_layout_and_gives_the_same_index():
    mesh = make_mesh((4,), ("context",))
    attend = functools.partial(with_residuals, pattern=PATTERN, sharding=Sharding(mesh, "context"))
    out, lse, index = attend(*inputs())  # eager; arrays are on one device
    wanted_out, wanted_lse, wanted_index = alone()
    assert_close((out, lse), (wanted_out, wanted_lse))
    assert jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(index), wanted_index))


def test_heads_can_be_sharded_along_with_their_budgets():
    mesh = make_mesh((2, 3), ("context", "tensor"))
    attend = functools.partial(
        with_residuals, pattern=BUDGET, sharding=Sharding(mesh, "context", heads="tensor")
    )
    out, lse, index = jax.jit(attend)(*inputs())
    wanted = alone("fixed")
    assert_close((out, lse), wanted[:2])
    assert jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(index), wanted[2]))


def test_an_index_is_reused_over_a_mesh_with_an_unsharded_sequence():
    mesh = make_mesh((2,), ("rows",))
    out, lse, index = alone()
    attend = functools.partial(with_lse, sharding=Sharding(mesh, batch="rows", sequence=()))
    assert_close(jax.jit(attend)(*inputs(), pattern=jax.tree.map(jnp.asarray, index)), (out, lse))


def test_mesh_and_axes_are_taken_from_explicit_shardings_of_q():
    mesh = make_mesh((2, 4), ("rows", "context"), AxisType.Explicit)
    layout = sequence_layout(TOKENS, mesh, sequence="context", block_size=BLOCK)
    place = functools.partial(jax.device_put, device=NamedSharding(mesh, P("rows", "context")))
    arrays = [place(stripe(x, layout)) for x in inputs()]
    dense = Dense(block_size=BLOCK)

    def attend(q, k, v):
        sharding = Sharding(order=layout.permutation())
        out = sparse_attention(q, k, v, pattern=dense, sharding=sharding)
        assert jax.typeof(out).sharding.spec == P("rows", "context", None, None)
        return unstripe(out, layout)  # under jit, the type keeps the sharding

    with jax.set_mesh(mesh):
        out = jax.jit(attend)(*arrays)
    assert jax.typeof(out).sharding.spec == P("rows", "context", None, None)
    assert_close(out, alone("dense")[0])


def test_vmap_over_a_batch_sharded_over_an_explicit_axis():
    mesh = make_mesh((2, 2), ("rows", "context"), AxisType.Explicit)
    place = functools.partial(jax.device_put, device=NamedSharding(mesh, P("rows", "context")))
    attend = functools.partial(
        sparse_attention, pattern=Dense(block_size=BLOCK), sharding=Sharding(sequence="context")
    )
    with jax.set_mesh(mesh):
        out = jax.jit(jax.vmap(attend))(*map(place, inputs()))
    assert_close(out, alone("dense")[0])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_inside_a_user_shard_map_each_shard_is_independent(axis_type):
    mesh = make_mesh((2,), ("rows",), axis_type)
    rows = P("rows")
    attend = functools.partial(sparse_attention, pattern=Dense(block_size=BLOCK))
    with jax.set_mesh(mesh):
        arrays = jax.device_put(inputs(), NamedSharding(mesh, rows))
        mapped = jax.shard_map(attend, in_specs=rows, out_specs=rows, check_vma=False)
        out = jax.jit(mapped)(*arrays)
    assert_close(out, alone("dense")[0])


@pytest.mark.parametrize(
    ("sharding", "checked", "sentence"),
    [
        (None, True, "q is in a jax.shard_map with check_vma=True.* pass check_vma=False"),
        (Sharding(sequence="rows"), False, "sharding.sequence=.* are sharded by a jax.shard_map"),
    ],
)
def test_unsupported_calls_inside_a_user_shard_map_raise(sharding, checked, sentence):
    attend = functools.partial(sparse_attention, pattern=PATTERN, sharding=sharding)
    mapped = jax.shard_map(
        attend, mesh=MESH, in_specs=P("rows"), out_specs=P("rows"), check_vma=checked
    )
    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(mapped, *inputs())


def test_named_axes_use_the_mesh_in_context():
    mesh = make_mesh((2, 2), ("node", "device"))
    attend = functools.partial(
        sparse_attention,
        pattern=Dense(block_size=BLOCK),
        sharding=Sharding(sequence=("node", "device"), order="striped"),
    )
    layout = Layout("striped", TOKENS, 4, BLOCK, nodes=2)
    with jax.set_mesh(mesh):
        out = jax.jit(attend)(*(stripe(x, layout) for x in inputs()))
    assert_close(unstripe(jax.device_get(out), layout), alone("dense")[0])


# Nothing runs on these, so they need no devices.
def abstract(shape, names):
    return AbstractMesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


MESH = abstract((2, 4), ("rows", "context"))
OWN = {"mesh": MESH, "batch": "rows", "sequence": "context"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mesh": MESH}, r"the mesh has axes \('rows', 'context'\), without the default "
                         r"sharding.sequence=.* or to \(\) for none"),
        ({**OWN, "batch": "row"}, "sharding.batch=..row',. names 'row', which is not an axis of "
                                       "the mesh; its axes are"),
        ({**OWN, "heads": "context"}, "sharding.heads=..context',. and sharding.sequence both name "
                                          "'context'"),
        ({"mesh": abstract((1, 1, 2), ("a", "b", "c")), "sequence": ("a", "b", "c")},
         "has 3 axes; one or two"),
        ({**OWN, "batch": "context", "sequence": "rows"},
         "q has batch 2; .* multiple of the 4 devices on sharding.batch=..context',., such as 4"),
        ({**OWN, "batch": (), "heads": "context", "sequence": "rows"},
         "k has 3 heads; .* multiple of the 4 devices on sharding.heads=..context',., such as 4"),
        ({**OWN, "pattern": Dense(block_size=64)},
         "q has 128 tokens; expected a multiple of 256 .block_size=64 x 4 devices on "
         "sharding.sequence=..context',.., such as 256"),
        ({**OWN, "pattern": Dense(block_size=32), "order": "zigzag"},
         "seq_len=128 must be a multiple of 256 for the zigzag layout"),
        ({**OWN, "order": Layout("striped", TOKENS, 2, BLOCK)},
         "sharding.order has num_ranks=2, but q, the pattern and sharding.sequence need 4"),
        ({**OWN, "order": Layout("striped", TOKENS, 4, 16)},
         "sharding.order has block_size=16, but .* 8"),
        ({**OWN, "order": np.arange(TOKENS)[::-1]},
         "sharding.order matches no striped, zigzag, contiguous layout over 4 devices"),
        ({**OWN, "pattern": Dense(block_size=8), "causal": False},
         "causal=False needs an unsharded sequence"),
        ({**OWN, "ring": "round"},
         "sharding.ring='round' is unknown; it must be one of hierarchical, flat"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_match_the_mesh_raise(options, sentence):
    fields = {"pattern": PATTERN, "causal": True} | options
    call = {name: fields.pop(name) for name in ("pattern", "causal")}
    attend = functools.partial(sparse_attention, sharding=Sharding(**fields), **call)
    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(attend, *inputs())


def test_a_layout_over_missing_axes_raises():
    with pytest.raises(ValueError, match="sequence=..node', 'device'. names 'node', which"):
        sequence_layout(TOKENS, MESH)
    with pytest.raises(ValueError, match="seq_len=100 must be a multiple of 512 .* nearest: 512"):
        sequence_layout(100, MESH, sequence="context")
    with pytest.raises(ValueError, match="mesh=8 must be a jax.sharding.Mesh"):
        sequence_layout(TOKENS, 8)
    with pytest.raises(ValueError, match="layout='striped' must be a Layout; .*sequence_layout"):
        stripe(inputs()[0], "striped")
