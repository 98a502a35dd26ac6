"""Ring attention over 8 devices inside your own jit, with your own mesh and axis names.

    python examples/ring_attention.py

It needs 8 devices; on a machine without accelerators, or with JAX_PLATFORMS=cpu, it creates 8
virtual CPU devices. It compares output and gradients with those of one device.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax import SampledRows, Sharding, sequence_layout, sparse_attention, stripe, unstripe

BATCH, TOKENS, FEATURES, HEADS, KV_HEADS, HEAD_DIM = 1, 512, 32, 4, 2, 16
SEQUENCE_AXES = ("hosts", "chips")  # slowest first: "chips" is the inner ring

# Small enough for 512 tokens. For long sequences use the default, SampledRows().
PATTERN = SampledRows(block_size=16, tau=0.5)


def parameters() -> dict[str, jax.Array]:
    """Projections of one attention layer, fp32."""
    rng = np.random.default_rng(0)
    shapes = {
        "q": (FEATURES, HEADS, HEAD_DIM),
        "k": (FEATURES, KV_HEADS, HEAD_DIM),
        "v": (FEATURES, KV_HEADS, HEAD_DIM),
        "out": (HEADS, HEAD_DIM, FEATURES),
    }
    scale = FEATURES**-0.5
    return {
        name: jnp.asarray(scale * rng.normal(size=shape), jnp.float32)
        for name, shape in shapes.items()
    }


def inputs() -> np.ndarray:
    """Activations fp32 [B, S, E] in the order of the sequence."""
    return np.random.default_rng(1).normal(size=(BATCH, TOKENS, FEATURES)).astype(np.float32)


def layer(params: dict[str, jax.Array], x: jax.Array, sharding: Sharding | None) -> jax.Array:
    """Your own layer: [B, S, E] to [B, S, E]."""
    q, k, v = (jnp.einsum("bse,ehd->bshd", x, params[name]) for name in "qkv")
    attended = sparse_attention(q, k, v, PATTERN, sharding=sharding)
    return x + jnp.einsum("bshd,hde->bse", attended, params["out"])


def output_and_gradients(
    params: dict[str, jax.Array], x: jax.Array, sharding: Sharding | None = None
):
    """Output of the layer, and gradients of a loss over all tokens."""

    def loss(params, x):
        out = layer(params, x, sharding)
        return jnp.square(out).sum() / out.size, out

    (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)
    return out, gradients


def on_one_device():
    """Output [B, S, E], and gradients of the parameters and of the input."""
    return jax.jit(output_and_gradients)(parameters(), inputs())


def on_a_ring(mesh: Mesh):
    """The same on 8 devices; the input is sharded once, and the output gathered."""
    layout = sequence_layout(TOKENS, mesh, sequence=SEQUENCE_AXES, block_size=PATTERN.block_size)
    sharding = Sharding(mesh, sequence=SEQUENCE_AXES, order=layout)
    x = jax.device_put(stripe(inputs(), layout), NamedSharding(mesh, P(None, SEQUENCE_AXES)))
    params = jax.device_put(parameters(), NamedSharding(mesh, P()))

    @jax.jit
    def step(params, x):
        return output_and_gradients(params, x, sharding)

    out, (params_gradient, x_gradient) = step(params, x)
    assert out.sharding.spec[1] == SEQUENCE_AXES  # nothing was gathered
    out, x_gradient = unstripe(jax.device_get((out, x_gradient)), layout)
    return out, (params_gradient, x_gradient)


def main() -> float:
    """Runs both, and prints and returns the largest difference."""
    mesh = jax.make_mesh((2, 4), SEQUENCE_AXES, axis_types=(AxisType.Auto,) * 2)
    alone, ring = jax.device_get((on_one_device(), on_a_ring(mesh)))
    apart = 0.0
    for name, one, many in zip(("output", "gradients"), alone, ring, strict=True):
        differences = jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(a).max(), one, many)
        largest = max(jax.tree.leaves(differences))
        print(f"{name}: largest difference between 1 and 8 devices {largest:.1e} (relative)")
        apart = max(apart, float(largest))
    return apart


if __name__ == "__main__":
    # Must come before JAX looks for devices; both apply only to CPUs. With enough threads, virtual
    # devices can wait for one another on a machine with few cores.
    os.environ.setdefault("NPROC", "32")
    jax.config.update("jax_num_cpu_devices", 8)
    main()
