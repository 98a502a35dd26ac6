"""Rows of blocks scored per step: the best number, and bit-identical results for all numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import masses
from pallas_kernels.masses import LOG2E, BlockScores, ScoreTiles, parts_at_once

TILE_ROWS, ROWS, COLUMNS, LENGTH = 8, 4, 8, 16


def walked(count, items, programs, size):
    """Simulated time: each program runs its items one after another, steps wait for all."""
    time = 0
    for begin in range(0, count, size):
        end = min(begin + size, count)
        lengths = [part + 1 for part in reversed(range(begin, end)) for _ in range(items)]
        time += max(sum(lengths[program::programs]) for program in range(programs))
    return time


@pytest.mark.parametrize(
    ("count", "items", "programs", "room"),
    [(32, 9, 132, 14.2), (40, 3, 5, 7.0), (7, 1, 132, 0.4), (64, 32, 132, 2.0)],
)
def test_the_number_of_parts_per_step_takes_the_least_time(count, items, programs, room):
    def best(most):
        return min(walked(count, items, programs, size) for size in range(1, max(1, int(most)) + 1))

    size = parts_at_once(count, items, programs, room)
    time = walked(count, items, programs, size)
    assert 1 <= size <= max(1, 2 * room)
    # Additional memory is used only where it saves time.
    assert time <= 1.02 * best(2 * room)
    if size > max(1, int(room)):
        assert 1.02 * time < best(room)


def test_excess_items_are_left_to_another_step():
    # 9 heads, 132 thread blocks: 14 parts are 126 items, 15 would be 135 and need two rounds.
    assert parts_at_once(256, 9, 132, 7.2) == 14
    assert walked(256, 9, 132, 15) > 1.7 * walked(256, 9, 132, 14)
    # Everything, if there is room.
    assert parts_at_once(16, 9, 132, 1000.0) == 16


class Scores(BlockScores):
    """Scores of whole blocks by XLA, in the form of a kernel; records the row tiles per step."""

    def __init__(self):
        self.steps = []

    def tiles(self, length):
        return ScoreTiles(TILE_ROWS, COLUMNS, programs=4)

    def scores(self, call):
        q, k, places, starts, scale, block_columns = call
        assert scale == 1.0 and block_columns == COLUMNS
        self.steps.append(q.shape[2] // TILE_ROWS)
        return score(q, k, places, starts)


def score(q, k, places, starts):
    group = q.shape[1] // k.shape[1]
    products = jnp.einsum("bhre,bhce->bhrc", q, jnp.repeat(k, group, axis=1)).astype(jnp.float32)
    numbers = jnp.arange(k.shape[2])
    seen = numbers <= places[:, None, :, None]
    if starts is not None:
        seen &= numbers >= starts[:, None, :, None]
    scaled = jnp.where(seen, products * LOG2E, -jnp.inf)
    of_blocks = scaled.reshape(*scaled.shape[:3], -1, COLUMNS)
    peak = of_blocks.max(-1)
    sums = jnp.exp2(of_blocks - jnp.where(peak > -jnp.inf, peak, 0.0)[..., None]).sum(-1)
    return jnp.swapaxes(peak + jnp.log2(sums), 2, 3), scaled.max(-1)


@pytest.mark.parametrize("documents", [False, True])
def test_masses_are_bit_identical_for_any_number_of_steps(documents, monkeypatch):
    blocks, heads = 22, 2
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(1, heads, blocks, ROWS, LENGTH)), jnp.bfloat16)
    k = jnp.asarray(rng.normal(size=(1, 1, blocks, COLUMNS, LENGTH)), jnp.bfloat16)
    own = np.arange(blocks)[:, None] * COLUMNS
    places = jnp.asarray(own + (np.arange(ROWS) + 1) * COLUMNS // ROWS - 1, jnp.int32)[None]
    first = jnp.asarray([[0] * 5 + [5] * 17], jnp.int32) if documents else None
    of_one, kernels = 4 * heads * ROWS * blocks, Scores()

    def found(parts):
        monkeypatch.setattr(masses, "_SCORE_BYTES", parts * of_one * TILE_ROWS // ROWS)

        masses_of = jax.jit(functools.partial(kernels.block_masses, scale=1.0, levels=True))
        return masses_of(q, k, places, first)

    whole, parts = found(100), found(4)
    # 11 row tiles: all at once, and a number at which the last step has some padding.
    steps = kernels.steps
    assert steps[0] == 11 and 1 < steps[1] < 11 and 11 % steps[1]
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(np.asarray(whole[0]).sum(-1), 1.0, atol=1e-6)


@pytest.mark.parametrize("blocks", [1 << 14, 1 << 16])
def test_masses_of_the_longest_sequences_sum_to_one(blocks):
    # Equally heavy blocks, the worst case of sums in fixed point.
    q = jnp.ones((1, 1, 1, ROWS, LENGTH), jnp.bfloat16)
    k = jnp.ones((1, 1, blocks, COLUMNS, LENGTH), jnp.bfloat16)
    places = jnp.full((1, 1, ROWS), blocks * COLUMNS - 1, jnp.int32)
    found = jax.jit(functools.partial(Scores().block_masses, scale=1.0))(q, k, places)
    np.testing.assert_allclose(np.asarray(found)[0, 0, 0], 1 / blocks, rtol=1e-3)
    long_rows = (jax.ShapeDtypeStruct((*x.shape[:4], 64), x.dtype) for x in (q, k))
    assert Scores().unsupported(*long_rows) is None
