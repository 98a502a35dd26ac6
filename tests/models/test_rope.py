import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.errors import UserError
from mtraining_jax.models import YarnScaling
from mtraining_jax.models.rope import apply_rope, rope_frequencies, rope_tables
from tests.models.common import tiny_spec


def qwen_3b(original):
    return tiny_spec(
        head_dim=128,
        max_position_embeddings=524288,
        rope_scaling=YarnScaling(factor=16.0, original_max_position_embeddings=original),
    )


@pytest.mark.parametrize(("original", "first", "last"), [(32768, 23, 40), (None, 36, 53)])
def test_the_two_readings_of_yarn(original, first, last):
    # Qwen2.5-3B at 512K: the field decides which dimensions are blended; without it the range
    # follows from max_position_embeddings.
    plain, _ = rope_frequencies(tiny_spec(head_dim=128))
    scaled, factor = rope_frequencies(qwen_3b(original))
    np.testing.assert_allclose(scaled[: first + 1], plain[: first + 1], rtol=1e-12)
    np.testing.assert_allclose(scaled[last:], plain[last:] / 16, rtol=1e-12)
    between = scaled[first + 1 : last] / plain[first + 1 : last]
    assert np.all(np.diff(between) < 0) and between[0] < 1 and between[-1] > 1 / 16
    np.testing.assert_allclose(factor, 1.2772588722239782, rtol=1e-12)


def test_yarn_without_truncation_starts_between_dimensions():
    scaling = YarnScaling(16.0, 32768, truncate=False)
    plain, _ = rope_frequencies(tiny_spec(head_dim=128))
    scaled, _ = rope_frequencies(tiny_spec(head_dim=128, rope_scaling=scaling))
    kept = np.isclose(scaled, plain, rtol=1e-12).sum()
    divided = np.isclose(scaled, plain / 16, rtol=1e-12).sum()
    # Border dimensions 23.59... and 39.65: 0..23 are kept, 40..63 divided.
    assert (kept, divided) == (24, 24)


def test_an_attention_factor_overrides_the_default():
    spec = tiny_spec(rope_scaling=YarnScaling(4.0, 64, attention_factor=1.0))
    assert rope_frequencies(spec)[1] == 1.0


@pytest.mark.parametrize("last", [1 << 19, 1 << 21, (1 << 22) - 1])
def test_angles_stay_exact_at_millions_of_tokens(last):
    spec = tiny_spec(head_dim=128)
    positions = np.arange(last - 4096, last + 1, dtype=np.int32)
    cos, sin = jax.jit(lambda p: rope_tables(p, spec))(positions)
    angles = positions[:, None].astype(np.float64) * rope_frequencies(spec)[0]
    np.testing.assert_allclose(cos[0, :, 0], np.cos(angles), atol=2e-4)
    np.testing.assert_allclose(sin[0, :, 0], np.sin(angles), atol=2e-4)


def test_scores_depend_on_distance_alone():
    spec = tiny_spec(head_dim=16)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 2, 16))

    def scores(query, key):
        turned_q = apply_rope(q, *rope_tables(jnp.array([query]), spec))
        turned_k = apply_rope(k, *rope_tables(jnp.array([key]), spec))
        return jnp.sum(turned_q * turned_k, axis=-1)

    np.testing.assert_allclose(scores(100, 60), scores(500_040, 500_000), atol=2e-3)
    assert np.abs(scores(100, 60) - scores(100, 61)).max() > 1e-2


def test_positions_may_differ_between_sequences():
    spec = tiny_spec()
    positions = jnp.array([[0, 1, 2], [7, 3, 5]], jnp.int32)
    cos, sin = rope_tables(positions, spec)
    alone, _ = rope_tables(positions[1], spec)
    assert cos.shape == sin.shape == (2, 3, 1, 4)
    np.testing.assert_array_equal(cos[1], alone[0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"original_max_position_embeddings": 64}, "factor is missing"),
        ({"factor": 0.5}, "at least 1"),
        ({"factor": 2.0, "type": "linear"}, 'allowed is "yarn"'),
        ({"factor": 2.0, "beta_fast": 1, "beta_slow": 2}, "beta_fast=1"),
        ({"factor": 2.0, "original_max_position_embeddings": -1}, "must be positive"),
    ],
)
def test_impossible_scaling_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        YarnScaling.from_config(values)
