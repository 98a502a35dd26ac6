"""Sliding windows against attention with a dense mask, on one device and on eight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax import Documents, Layout, Sharding, SlidingWindow, stripe, unstripe
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.utils.limits import MAX_POSITIONS
from pallas_kernels.reference import reference_attention
from tests.attention.inputs import with_lse

TOKENS, SIZE = 512, 32
SCALE = 0.5  # not the default of heads of 8
# The last document is followed by a block of padding.
LENGTHS = (150, 96, 200)


@functools.cache
def inputs():
    """q, k, v, and the gradients of out and lse."""
    rng = np.random.default_rng(0)
    shapes = (1, TOKENS, 2, 8), (1, TOKENS, 1, 8), (1, TOKENS, 1, 8), (1, TOKENS, 2, 8)
    arrays = [rng.normal(size=shape) for shape in (*shapes, (1, 2, TOKENS))]
    return [jnp.asarray(x, jnp.float32) for x in arrays]


def with_gradients(attend, q, k, v, dout, dlse):
    (out, lse), gradients = jax.vjp(attend, q, k, v)
    seen = lse > -jnp.inf
    return out, jnp.where(seen, lse, 0), *gradients((dout, jnp.where(seen, dlse, 0)))


@jax.jit
def expected(window, of_document, *arrays):
    places = jnp.arange(TOKENS)
    distance = places[:, None] - places
    mask = (distance >= 0) & (distance < window)
    mask &= (of_document[:, None] == of_document) & (of_document >= 0)

    def attend(q, k, v):
        return reference_attention(q, k, v, mask[None, None], scale=SCALE)

    return with_gradients(attend, *arrays)


def documents_of(lengths):
    """`Documents`, and the number of each token's document; -1 for padding blocks."""
    blocks = [-(-n // SIZE) for n in lengths]
    number = np.repeat(np.arange(len(blocks)), np.array(blocks) * SIZE)
    number = np.append(number, np.full(TOKENS - len(number), -1))
    return Documents.from_lengths([lengths], TOKENS, SIZE), number


@pytest.mark.parametrize(
    ("window", "lengths", "kind", "nodes"),
    [(16, LENGTHS, "striped", 2), (32, (TOKENS,), "zigzag", 1), (256, LENGTHS, "contiguous", 2)],
)
def test_windows_agree_with_a_dense_mask(window, lengths, kind, nodes):
    documents, number = documents_of(lengths)
    wanted = jax.device_get(expected(window, number, *inputs()))
    whole = len(lengths) == 1

    def attend(q, k, v, **how):
        pattern = SlidingWindow(window, SIZE)
        how |= {} if whole else {"documents": documents}
        return with_lse(q, k, v, pattern=pattern, scale=SCALE, **how)

    found = jax.jit(functools.partial(with_gradients, attend))(*inputs())
    layout = Layout(kind, TOKENS, 8, SIZE, nodes)
    mesh = make_mesh(1, nodes, 8 // nodes)

    def over_devices(*arrays):
        ring = functools.partial(attend, sharding=Sharding(mesh, order=layout))
        order = layout.permutation()
        *arrays, dlse = arrays
        arrays = [*(stripe(x, layout) for x in arrays), dlse[..., order]]
        out, lse, *gradients = with_gradients(ring, *arrays)
        back = [unstripe(x, layout) for x in (out, *gradients)]
        return back[0], lse[..., layout.inverse()], *back[1:]

    traced = jax.jit(over_devices).trace(*inputs())
    assert "all_gather" not in str(traced.jaxpr)  # only keys that a window reaches travel
    over = traced.lower().compile()(*inputs())
    for one, several, right in zip(found, over, wanted, strict=True):
        np.testing.assert_allclose(one, right, atol=1e-5)
        np.testing.assert_allclose(several, right, atol=1e-5)


@pytest.mark.parametrize("window", [1, MAX_POSITIONS + 1])
def test_windows_have_limits(window):
    message = f"window={window} must be an integer .at least 2 and at most 8388608"
    with pytest.raises(ValueError, match=message):
        SlidingWindow(window)
