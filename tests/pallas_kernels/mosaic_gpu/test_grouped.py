"""Products of rows sorted by group, in Pallas' GPU interpreter and compiled for an H200."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import backends
from pallas_kernels.mosaic_gpu.kernels import grouped
from pallas_kernels.mosaic_gpu.kernels.grouped import grouped_product
from tests.pallas_kernels.mosaic_gpu.hopper import described_h200s

WATCHED = plgpu.InterpretGPUParams(detect_races=True)
SIZES = (128, 0, 256)
ROWS = 512  # the last 128 have no group
# Shapes of operands, with two steps of products.
CASES = {
    "dot": ((ROWS, 128), (3, 256, 128)),
    "transposed": ((ROWS, 128), (3, 128, 256)),
    "outer": ((ROWS, 128), (ROWS, 256)),
}


def test_tiles_are_those_that_callers_know():
    assert (grouped.ROW_TILE, grouped.WIDTH) == (backends.GROUPED_ROWS, backends.GROUPED_WIDTH)


@pytest.mark.parametrize("kind", CASES)
def test_products_of_groups(kind):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in CASES[kind])
    found = np.asarray(grouped_product(kind, a, b, jnp.array(SIZES, jnp.int32), WATCHED))
    races = interpreter.get_races()
    interpreter.reset_gpu_interpret_mode_state()
    assert not races.races_found
    a, b = (np.asarray(x, np.float32) for x in (a, b))
    first = 0
    for group, size in enumerate(SIZES):
        rows, first = slice(first, first + size), first + size
        if kind == "outer":
            np.testing.assert_allclose(found[group], a[rows].T @ b[rows], rtol=1e-4, atol=1e-3)
        else:
            expected = a[rows] @ (b[group].T if kind == "dot" else b[group])
            np.testing.assert_allclose(found[rows].astype(np.float32), expected, rtol=1e-2, atol=1)


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the CUDA plugin of JAX"
)
@pytest.mark.parametrize("kind", CASES)
def test_compiles_without_copies(kind):
    mesh = Mesh(np.array(described_h200s(1)), ("x",), axis_types=(AxisType.Auto,))
    rows, groups, width, inner = 16384, 16, 2048, 768
    shapes = {
        "dot": ((rows, width), (groups, inner, width)),
        "transposed": ((rows, inner), (groups, inner, width)),
        "outer": ((rows, inner), (rows, width)),
    }[kind]
    sharding = NamedSharding(mesh, PartitionSpec())
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32, sharding=sharding)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        run = jax.jit(lambda *x: grouped_product(kind, *x))
        compiled = run.trace(a, b, sizes).lower(lowering_platforms=("cuda",)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20
