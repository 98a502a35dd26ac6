"""Inspects the index of a pattern: density, budgets, recall, and a picture of the masks.

    python examples/look_at_index.py --png masks.png

Queries and keys are synthetic: noise, a few keys that every query attends to, and a rotation that
makes queries attend to keys at certain distances, with different weights in every head.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from mtraining_jax import Inspection, VerticalSlash, inspect, sparse_attention

HEADS, HEAD_DIM = 3, 64


def queries_and_keys(tokens: int) -> tuple[jax.Array, jax.Array]:
    """q, k fp32 [1, tokens, HEADS, HEAD_DIM]."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, tokens, HEADS, HEAD_DIM))
    wanted = rng.choice(tokens, 12, replace=False)
    angle = np.arange(tokens)[:, None] * 2 * np.pi / np.array([tokens / 2, tokens / 5, tokens / 9])
    columns, distances = np.array([30.0, 4.0, 14.0]), np.array([1.0, 6.0, 3.0])
    q[..., 0] += 4
    k[:, wanted, :, 0] += columns
    for x in (q, k):
        x[..., 1:4] += distances[:, None] * np.cos(angle)[:, None]
        x[..., 4:7] += distances[:, None] * np.sin(angle)[:, None]
    return jnp.asarray(q, jnp.float32), jnp.asarray(k, jnp.float32)


def main(tokens: int, png: str | None) -> Inspection:
    """Prints a table, and writes a picture to `png`, if given."""
    q, k = queries_and_keys(tokens)
    _, residuals = sparse_attention(q, k, k, pattern=VerticalSlash(), return_residuals=True)
    found = inspect(residuals.index, q, k, rows=64)
    print(found)
    if png is not None:
        found.save_picture(png, heads=range(HEADS))
        print(f"wrote {png}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="sequence length, multiple of 128")
    parser.add_argument("--png", help="path of the picture")
    arguments = parser.parse_args()
    main(arguments.tokens, arguments.png)
