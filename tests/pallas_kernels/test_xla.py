import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import VerticalSlashIndex
from pallas_kernels.reference import reference_attention
from tests.pallas_kernels.helpers.contract import AttentionContract


class TestXla(AttentionContract):
    backend = "xla"
    other_block_sizes = (16,)
    other_dims = (64,)
    group_heads = ((2, 2), (5, 1), (14, 2))  # no kernels, where each group is another case


@pytest.fixture(scope="module")
def compiled_at_4096():
    """Forward and backward at S = 4096: the jaxpr and the compiled program."""
    seq_len, heads, dim = 4096, 2, 16
    q = jax.ShapeDtypeStruct((1, seq_len, heads, dim), jnp.float32)
    index = VerticalSlashIndex(
        *(jax.ShapeDtypeStruct((1, heads, *shape), jnp.int32) for shape in ((8,), (), (256,), ())),
        block_size=128,
    )

    def step(q, k, v, dout, index):
        attention = functools.partial(pallas_kernels.attention, backend="xla")
        out, vjp = jax.vjp(lambda *qkv: attention(*qkv, index), q, k, v)
        return out, vjp(dout)

    traced = jax.jit(step).trace(q, q, q, q, index)
    return seq_len, traced.jaxpr, traced.lower().compile()


def test_no_array_of_all_pairs_is_traced(compiled_at_4096):
    seq_len, jaxpr, _ = compiled_at_4096
    sizes = [int(np.prod(shape)) for shape in _shapes(jaxpr.jaxpr)]
    assert len(sizes) > 200
    assert max(sizes) < seq_len**2 // 4


def test_the_search_for_such_arrays_finds_them_in_the_oracle():
    q = jax.ShapeDtypeStruct((1, 256, 1, 16), jnp.float32)
    mask = jax.ShapeDtypeStruct((1, 1, 256, 256), bool)
    jaxpr = jax.jit(reference_attention).trace(q, q, q, mask).jaxpr
    assert max(int(np.prod(shape)) for shape in _shapes(jaxpr.jaxpr)) >= 256**2


def test_temporary_memory_is_less_than_a_byte_per_pair(compiled_at_4096):
    seq_len, _, compiled = compiled_at_4096
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert 0 < temporary < seq_len**2


def _shapes(jaxpr):
    """Shapes of every value in a jaxpr and its inner jaxprs."""
    for equation in jaxpr.eqns:
        yield from (x.aval.shape for x in (*equation.invars, *equation.outvars))
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from _shapes(getattr(inner, "jaxpr", inner))
