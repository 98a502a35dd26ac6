import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.models.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    YarnScaling,
    make_scaling,
)
from mtraining_jax.models.rope.rotary import apply_rope, rope_frequencies, rope_tables
from tests.models.common import tiny_spec


def frequencies(scaling=None, head_dim=128, theta=1e6, context=32768, length=4096):
    spec = tiny_spec(
        head_dim=head_dim, rope_theta=theta, rope_scaling=scaling, max_position_embeddings=context
    )
    return rope_frequencies(spec, length)


@pytest.mark.parametrize(("original", "first", "last"), [(32768, 23, 40), (None, 36, 53)])
def test_the_two_interpretations_of_yarn(original, first, last):
    # Qwen2.5-3B at 512K: the field determines which dimensions are blended; without it the range
    # follows from max_position_embeddings.
    plain, _ = frequencies()
    scaling = YarnScaling(factor=16.0, original_max_position_embeddings=original)
    scaled, factor = frequencies(scaling, context=524288)
    np.testing.assert_allclose(scaled[: first + 1], plain[: first + 1], rtol=1e-12)
    np.testing.assert_allclose(scaled[last:], plain[last:] / 16, rtol=1e-12)
    between = scaled[first + 1 : last] / plain[first + 1 : last]
    assert np.all(np.diff(between) < 0) and between[0] < 1 and between[-1] > 1 / 16
    np.testing.assert_allclose(factor, 1.2772588722239782, rtol=1e-12)


@pytest.mark.parametrize(
    ("theta", "original", "fields", "scale", "expected"),
    [
        # The ramp would end after the last dimension, and begin before the first one.
        (10.0, 512, {}, 1.138629436, [1, 1, 1, 1, 0.9375, 0.875, 0.8125, 0.75]),
        (1e4, 64, {}, 1.138629436, [1, 0.75, 0.5, *[0.25] * 5]),
        # It would begin after the last dimension, and end before the first one.
        (10.0, 65536, {}, 1.138629436, [0.25] * 8),
        (1e4, 1, {}, 1.138629436, [1] * 8),
        (1e4, 512, {"mscale": 1.5, "mscale_all_dim": 0.5}, 1.129643251, None),
        (1e4, 512, {"mscale": 1.5}, 1.138629436, None),
        (1e4, 512, {"mscale": 1.5, "mscale_all_dim": 0.5, "attention_factor": 2.0}, 2.0, None),
    ],
)
def test_yarn_is_that_of_transformers(theta, original, fields, scale, expected):
    """Golden values of transformers 5.24, relative to the unscaled frequencies."""
    rope = {"factor": 4.0, "original_max_position_embeddings": original}
    scaling = YarnScaling.from_hf(rope | fields, 2048)
    found, factor = frequencies(scaling, head_dim=16, theta=theta, context=2048)
    np.testing.assert_allclose(factor, scale, rtol=1e-8)
    plain, _ = frequencies(head_dim=16, theta=theta)
    expected = expected or [1, 0.8125, 0.625, 0.4375, *[0.25] * 4]
    np.testing.assert_allclose(found / plain, expected, rtol=1e-6)


def test_yarn_without_truncation_starts_between_dimensions():
    plain, _ = frequencies()
    scaled, _ = frequencies(YarnScaling(16.0, 32768, truncate=False))
    kept = np.isclose(scaled, plain, rtol=1e-12).sum()
    divided = np.isclose(scaled, plain / 16, rtol=1e-12).sum()
    # Limits of the ramp are 23.59... and 39.65: dimensions 0..23 are kept, 40..63 divided.
    assert (kept, divided) == (24, 24)


def test_an_attention_factor_overrides_the_default():
    assert frequencies(YarnScaling(4.0, 64, attention_factor=1.0))[1] == 1.0
    longrope = LongRopeScaling(4.0, 64, 1.5, (1.0,) * 64, (2.0,) * 64)
    assert frequencies(longrope)[1] == 1.5


def test_linear_divides_all_alike():
    scaled, factor = frequencies(LinearScaling(4.0))
    np.testing.assert_allclose(scaled, frequencies()[0] / 4, rtol=1e-12)
    assert factor == 1.0


def test_llama3_keeps_high_and_divides_low_frequencies():
    # Llama 3.1: 8192 tokens scaled by 8.
    plain, _ = frequencies(theta=5e5)
    scaled, factor = frequencies(Llama3Scaling(8.0, 8192), theta=5e5)
    assert factor == 1.0
    turns = 8192 * plain / (2 * math.pi)
    np.testing.assert_allclose(scaled[turns >= 4], plain[turns >= 4], rtol=1e-12)
    np.testing.assert_allclose(scaled[turns <= 1], plain[turns <= 1] / 8, rtol=1e-12)
    between = (turns > 1) & (turns < 4)
    share = (turns[between] - 1) / 3
    expected = plain[between] * (share + (1 - share) / 8)
    assert between.sum() >= 5
    np.testing.assert_allclose(scaled[between], expected, rtol=1e-12)


@pytest.mark.parametrize(("length", "divisor"), [(64, 2.0), (65, 3.0)])
def test_longrope_divides_by_the_length_of_the_sequence(length, divisor):
    scaling = LongRopeScaling(4.0, 64, None, (2.0,) * 64, (3.0,) * 64)
    scaled, factor = frequencies(scaling, length=length)
    np.testing.assert_allclose(scaled, frequencies()[0] / divisor, rtol=1e-12)
    np.testing.assert_allclose(factor, math.sqrt(1 + math.log(4) / math.log(64)), rtol=1e-12)


@pytest.mark.parametrize("last", [1 << 19, 1 << 21, (1 << 23) - 1])
def test_angles_stay_exact_at_millions_of_tokens(last):
    spec = tiny_spec(head_dim=128)
    positions = np.arange(last - 4096, last + 1, dtype=np.int32)
    cos, sin = jax.jit(lambda p: rope_tables(p, spec))(positions)
    angles = positions[:, None].astype(np.float64) * frequencies()[0]
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


LISTS = {"short_factor": [1.0, 1.0], "long_factor": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"original_max_position_embeddings": 64}, "factor is missing"),
        ({"factor": 0.5}, "at least 1"),
        ({"factor": 2.0, "type": "dynamic"}, "choose one of yarn, linear, llama3, longrope"),
        ({"factor": 2.0, "beta_fast": 1, "beta_slow": 2}, "beta_fast = 1"),
        ({"factor": 2.0, "beta_slow": 0}, "beta_slow = 0.0 must be positive"),
        ({"factor": 2.0, "original_max_position_embeddings": -1}, "must be positive"),
        ({"factor": 2.0, "type": "llama3"}, "original_max_position_embeddings is missing"),
        (
            {"factor": 2.0, "type": "llama3", "original_max_position_embeddings": 64,
             "low_freq_factor": 4.0},
            "low_freq_factor = 4.0 must be positive and less than high_freq_factor = 4.0",
        ),
        (
            {"factor": 2.0, "rope_type": "longrope", "original_max_position_embeddings": 64},
            "short_factor is missing: it needs a number per pair",
        ),
        (
            {"factor": 2.0, "type": "longrope", **LISTS, "long_factor": [0.0, 1.0],
             "original_max_position_embeddings": 64},
            "long_factor has 0.0; all must be positive",
        ),
    ],
)  # fmt: skip
def test_invalid_scaling_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        make_scaling(values)


def test_there_is_one_factor_per_pair():
    values = {"type": "longrope", "factor": 2.0, "original_max_position_embeddings": 64, **LISTS}
    with pytest.raises(ValueError, match="short_factor has 2 entries, but a head of 8 has 4 pairs"):
        tiny_spec(rope_scaling=make_scaling(values))


def test_tokens_of_documents_rotate_as_in_sequences_of_their_length():
    scaling = LongRopeScaling(4.0, 64, None, (2.0,) * 4, (3.0,) * 4)
    spec = tiny_spec(rope_scaling=scaling)
    lengths = np.repeat(np.array([[64, 65, 3]], np.int32), [4, 4, 2], axis=1)
    positions = np.array([[0, 1, 30, 63, 0, 1, 30, 64, 0, 2]], np.int32)
    found = rope_tables(positions, spec, lengths)
    for length in (64, 65, 3):
        own = lengths[0] == length
        wanted = rope_tables(positions[:, own], spec, length)
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(x[:, own], y)
    # Without a dependence on the length, lengths have no effect.
    plain = tiny_spec()
    for x, y in zip(
        rope_tables(positions, plain, lengths), rope_tables(positions, plain), strict=True
    ):
        np.testing.assert_array_equal(x, y)
