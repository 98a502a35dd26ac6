r"""A small diffusion transformer that denoises with AdaSpa's sparse attention, compared with dense.

    python examples/dit_adaspa.py
    python examples/dit_adaspa.py --grid 43 40 64 --heads 24 --head-dim 128 --layers 2 --block 128 \
        --dtype bfloat16 --train 0 --steps 12 --search 2 6

It learns to generate videos of moving spots (flow matching: the model predicts the direction of the
noise), then denoises one. The first steps are dense. At the steps of `--search`, each layer selects
the blocks with most attention mass, and reuses this index until the next search. Each line reports
the time of a step and of a dense step on the same input, the recall of the index, and the relative
error of the output compared with dense attention. It takes a minute on a CPU; the second command is
for one GPU: 110080 tokens.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":  # run from a checkout, only the script's own folder is importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from mtraining_jax import AdaSpa, Dense, SelectionContext, sparse_attention
from mtraining_jax.selection.scores.exact_masses import exact_masses, recall

CHANNELS = 4
ROPE_BASE = 100.0  # a video has few positions per axis

# (layer, q [B, S, H, D], k, v) -> [B, S, H, D]
Attend = Callable[[int, Array, Array, Array], Array]


class Layer(nnx.Module):
    """Attention and an MLP, each scaled and shifted by the denoising time."""

    def __init__(self, heads: int, head_dim: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        size = heads * head_dim
        linear = lambda n, m: nnx.Linear(n, m, dtype=dtype, use_bias=False, rngs=rngs)  # noqa: E731
        self.q, self.k, self.v = linear(size, size), linear(size, size), linear(size, size)
        # Tokens attend to similar ones from the start, so attention is not uniform before training.
        self.k.kernel[...] = self.q.kernel[...]
        self.out, self.up, self.down = (
            linear(size, size),
            linear(size, 4 * size),
            linear(4 * size, size),
        )
        self.norm = nnx.RMSNorm(size, use_scale=False, dtype=dtype, rngs=rngs)
        # Logits up to 4 sqrt(head_dim): a head can be as sharp as in trained models.
        self.head_norm = nnx.RMSNorm(
            head_dim, scale_init=nnx.initializers.constant(2.0), dtype=dtype, rngs=rngs
        )
        self.of_time = linear(size, 4 * size)
        self.heads = heads

    def __call__(self, x: Array, at: Array, phases: tuple, number: int, attend: Attend) -> Array:
        """Tokens [B, S, size] and time [B, size] to tokens."""
        scale, shift, scale_mlp, shift_mlp = jnp.split(self.of_time(at)[:, None], 4, axis=-1)
        y = self.norm(x) * (1 + scale) + shift
        q, k, v = (f(y).reshape(*y.shape[:2], self.heads, -1) for f in (self.q, self.k, self.v))
        q, k = (rotated(self.head_norm(z), phases) for z in (q, k))
        x = x + self.out(attend(number, q, k, v).reshape(x.shape))
        y = self.norm(x) * (1 + scale_mlp) + shift_mlp
        return x + self.down(nnx.gelu(self.up(y)))


class Denoiser(nnx.Module):
    """A diffusion transformer over the positions of a video."""

    def __init__(self, layers: int, heads: int, head_dim: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        size = heads * head_dim
        self.enter = nnx.Linear(CHANNELS, size, dtype=dtype, rngs=rngs)
        self.time = nnx.Linear(2 * CHANNELS, size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(Layer(heads, head_dim, dtype, rngs) for _ in range(layers))
        self.norm = nnx.RMSNorm(size, dtype=dtype, rngs=rngs)
        self.leave = nnx.Linear(size, CHANNELS, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array, at: Array, phases: tuple, attend: Attend) -> Array:
        """Videos fp32 [B, S, channels] at times [B] (1 is noise) to the direction of the noise."""
        waves = at[:, None] * 2.0 ** jnp.arange(CHANNELS)
        at = nnx.silu(self.time(jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], axis=-1)))
        x = self.enter(x)
        for number, layer in enumerate(self.layers):
            x = layer(x, at, phases, number, attend)
        return self.leave(self.norm(x)).astype(jnp.float32)


def rotary(grid: tuple[int, ...], head_dim: int) -> tuple[Array, Array]:
    """Cosines and sines [S, head_dim / 2] for the three coordinates of each token."""
    places = np.stack(np.meshgrid(*(np.arange(n) for n in grid), indexing="ij"), -1).reshape(-1, 3)
    angles = []
    for axis, pairs in enumerate(np.diff([0, *(head_dim // 2 * (i + 1) // 3 for i in range(3))])):
        angles.append(places[:, axis, None] * ROPE_BASE ** (-np.arange(pairs) / pairs))
    angles = np.concatenate(angles, -1)
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def rotated(x: Array, phases: tuple[Array, Array]) -> Array:
    """Rotates heads [B, S, H, D] by their positions."""
    cos, sin = (y[:, None] for y in phases)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def films(key: Array, count: int, grid: tuple[int, ...]) -> Array:
    """Spots of random color and size that move in straight lines: fp32 [count, S, channels]."""
    keys = jax.random.split(key, 4)
    start = jax.random.uniform(keys[0], (count, 1, 2))
    speed = jax.random.uniform(keys[1], (count, 1, 2), minval=-0.5, maxval=0.5)
    width = jax.random.uniform(keys[2], (count, 1), minval=0.05, maxval=0.2)
    colour = jax.random.normal(keys[3], (count, 1, CHANNELS))
    frame, *place = jnp.meshgrid(*(jnp.linspace(0, 1, n) for n in grid), indexing="ij")
    place = jnp.stack(place, -1).reshape(-1, 2) - start - speed * frame.reshape(-1, 1)
    return jnp.exp(-(place**2).sum(-1) / (2 * width**2))[..., None] * colour * 2


class Runner:
    """Compiled steps of a model: dense, with a search, and with a reused index."""

    def __init__(self, model: Denoiser, phases: tuple, pattern: AdaSpa):
        size = pattern.block_size
        dense = Dense(size)

        def attend_dense(_: int, q: Array, k: Array, v: Array) -> Array:
            return sparse_attention(q, k, v, pattern=dense, causal=False)

        def search(model: Denoiser, x: Array, at: Array) -> tuple:
            indices = []

            def attend(_: int, q: Array, k: Array, v: Array) -> Array:
                out, residuals = sparse_attention(
                    q, k, v, pattern=pattern, causal=False, return_residuals=True
                )
                indices.append(residuals.index)
                return out

            return model(x, at, phases, attend), indices

        def reuse(model: Denoiser, x: Array, at: Array, indices: list) -> Array:
            return model(
                x,
                at,
                phases,
                lambda i, q, k, v: sparse_attention(q, k, v, pattern=indices[i], causal=False),
            )

        def audit(model: Denoiser, x: Array, at: Array, indices: list) -> Array:
            """Minimum recall over heads, and mean recall."""
            shares = []

            def attend(i: int, q: Array, k: Array, v: Array) -> Array:
                blocks = jnp.arange(q.shape[1] // size)
                masses = exact_masses(
                    q, k, SelectionContext(blocks, blocks.size, causal=False), size
                )
                kept = indices[i].computes(blocks * size, blocks)[..., 0]
                shares.append(recall(masses, kept))
                return sparse_attention(q, k, v, pattern=indices[i], causal=False)

            model(x, at, phases, attend)
            return jnp.stack([jnp.stack(shares).min(), jnp.stack(shares).mean()])

        def train(model: Denoiser, optimizer: nnx.Optimizer, key: Array, grid: tuple) -> Array:
            keys = jax.random.split(key, 3)
            film = films(keys[0], 4, grid)
            noise, at = jax.random.normal(keys[1], film.shape), jax.random.uniform(keys[2], (4,))
            mixed = film + at[:, None, None] * (noise - film)

            def loss(model: Denoiser) -> Array:
                found = model(mixed, at, phases, attend_dense)
                return ((found - (noise - film)) ** 2).mean()

            value, gradients = nnx.value_and_grad(loss)(model)
            optimizer.update(model, gradients)
            return value

        self.model = model
        self.dense = nnx.jit(lambda model, x, at: model(x, at, phases, attend_dense))
        self.search, self.reuse, self.audit = nnx.jit(search), nnx.jit(reuse), nnx.jit(audit)
        self.train = nnx.jit(train, static_argnums=3)

    def timed(self, run: Callable, *arguments: object) -> tuple:
        """Returns the result of a program, and its time in ms without the first call."""
        jax.block_until_ready(run(self.model, *arguments))
        start = time.perf_counter()
        found = jax.block_until_ready(run(self.model, *arguments))
        return found, 1e3 * (time.perf_counter() - start)


def denoise(runner: Runner, noise: Array, steps: int, search: list[int]) -> Array:
    """Denoises videos, prints one line per step, and returns them."""
    x, indices = noise, None
    print(f"{'step':>4} {'kind':>6} {'ms':>9} {'dense ms':>9} {'recall':>7} {'worst':>6} error")
    for step in range(steps):
        at = jnp.full(x.shape[0], 1 - step / steps)
        dense, dense_ms = runner.timed(runner.dense, x, at)
        kind, found, ms, shares = "dense", dense, dense_ms, (1.0, 1.0)
        if step in search:
            kind, ((found, indices), ms) = "search", runner.timed(runner.search, x, at)
        elif indices is not None:
            kind, (found, ms) = "reuse", runner.timed(runner.reuse, x, at, indices)
        if indices is not None:
            shares = np.asarray(runner.audit(runner.model, x, at, indices))
        error = float(jnp.linalg.norm(found - dense) / jnp.linalg.norm(dense))
        print(
            f"{step:4d} {kind:>6} {ms:9.2f} {dense_ms:9.2f} {shares[1]:7.3f} {shares[0]:6.3f} "
            f"{error:.4f}"
        )
        x = x - found / steps
    return x


def main() -> None:
    """Trains, denoises and compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grid", type=int, nargs=3, default=(8, 8, 8), help="frames, rows, width")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=24, help="even")
    parser.add_argument("--block", type=int, default=32, help="block size in tokens")
    parser.add_argument("--sparsity", type=float, default=0.8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--train", type=int, default=60, help="training steps")
    parser.add_argument("--steps", type=int, default=16, help="denoising steps")
    parser.add_argument("--search", type=int, nargs="+", default=[3, 9], help="steps with a search")
    args = parser.parse_args()
    grid, tokens = tuple(args.grid), math.prod(args.grid)
    if tokens % args.block:
        parser.error(f"--grid has {tokens} tokens; it must be a multiple of --block {args.block}")
    model = Denoiser(args.layers, args.heads, args.head_dim, jnp.dtype(args.dtype), nnx.Rngs(0))
    pattern = AdaSpa(args.sparsity, block_size=args.block)
    runner = Runner(model, rotary(grid, args.head_dim), pattern)
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    for step in range(args.train):
        loss = runner.train(model, optimizer, jax.random.key(step), grid)
        if step % 20 == 0 or step == args.train - 1:
            print(f"training step {step}: loss {loss:.4f}")
    print(f"{tokens} tokens, {pattern.describe()}")
    noise = jax.random.normal(jax.random.key(1), (1, tokens, CHANNELS))
    found = denoise(runner, noise, args.steps, args.search)
    dense = noise
    for step in range(args.steps):
        at = jnp.full(1, 1 - step / args.steps)
        dense = dense - runner.dense(model, dense, at) / args.steps
    apart = float(jnp.linalg.norm(found - dense) / jnp.linalg.norm(dense))
    print(f"relative difference between the generated video and dense attention: {apart:.4f}")


if __name__ == "__main__":
    main()
