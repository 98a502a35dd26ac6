"""Products of rows sorted by expert on a Hopper GPU, with uneven and empty groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic_gpu.device import no_hopper_gpu
from pallas_kernels.mosaic_gpu.kernels.grouped import grouped_product

pytestmark = pytest.mark.skipif(no_hopper_gpu() is not None, reason="needs a Hopper GPU")
SIZES = (1024, 0, 128, 2048, 384)
ROWS, OUT, INTO = sum(SIZES) + 256, 768, 2048
CASES = {
    "dot": ((ROWS, INTO), (5, OUT, INTO)),
    "transposed": ((ROWS, OUT), (5, OUT, INTO)),
    "outer": ((ROWS, OUT), (ROWS, INTO)),
}


@pytest.mark.parametrize("kind", CASES)
def test_products_of_groups(kind):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in CASES[kind])
    run = jax.jit(lambda a, b, sizes: grouped_product(kind, a, b, sizes))
    found = np.asarray(run(a, b, jnp.array(SIZES, jnp.int32)))
    again = np.asarray(run(a, b, jnp.array(SIZES, jnp.int32)))
    used = slice(None) if kind == "outer" else slice(sum(SIZES))  # other rows are undefined
    np.testing.assert_array_equal(found[used], again[used])
    a, b = (np.asarray(x, np.float32) for x in (a, b))
    first = 0
    for group, size in enumerate(SIZES):
        rows, first = slice(first, first + size), first + size
        if kind == "outer":
            actual, expected = found[group], a[rows].T @ b[rows]
        elif size == 0:
            continue
        else:
            actual = found[rows].astype(np.float32)
            expected = a[rows] @ (b[group].T if kind == "dot" else b[group])
        error = np.abs(actual - expected).max() / max(1, np.abs(expected).max())
        assert error < (1e-5 if kind == "outer" else 4e-3)
