import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.tools.evaluate.engine.options import GenerateOptions
from mtraining_jax.tools.evaluate.engine.programs import first_token
from mtraining_jax.tools.evaluate.engine.sampling import NO_TOKEN, judge, kept_tokens, next_token
from mtraining_jax.utils.errors import UserError

LOGITS = jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25]]))


def test_the_fewest_likely_tokens_with_the_probability_are_kept():
    for top_p, kept in [(0.4, [1]), (0.6, [1, 3]), (0.76, [1, 2, 3]), (1.0, [0, 1, 2, 3])]:
        found = np.flatnonzero(kept_tokens(LOGITS, jnp.float32(top_p))[0])
        assert found.tolist() == kept, top_p


def test_tokens_are_sampled_by_their_probability_and_reproducibly():
    many = jnp.broadcast_to(LOGITS, (4000, 4))
    alone = jax.vmap(next_token, (0, None, None, None, 0, None))  # each with a seed of its own

    def draw(kind, temperature, top_p, seed, number):
        seeds = seed * 4000 + jnp.arange(4000, dtype=jnp.uint32)
        return np.asarray(alone(many[:, None], kind, temperature, top_p, seeds, number))[:, 0]

    all_ = draw("all", jnp.float32(1), jnp.float32(1), jnp.uint32(3), jnp.int32(5))
    shares = np.bincount(all_, minlength=4) / 4000
    np.testing.assert_allclose(shares, [0.1, 0.5, 0.15, 0.25], atol=0.03)
    again = draw("all", jnp.float32(1), jnp.float32(1), jnp.uint32(3), jnp.int32(5))
    np.testing.assert_array_equal(all_, again)
    other = draw("all", jnp.float32(1), jnp.float32(1), jnp.uint32(3), jnp.int32(6))
    assert (all_ != other).any()
    # At temperature 0.5 probabilities are squared: 0.01, 0.25, 0.0225, 0.0625 of 0.345.
    cold = draw("top_p", jnp.float32(0.5), jnp.float32(0.9), jnp.uint32(0), jnp.int32(0))
    shares = np.bincount(cold, minlength=4) / 4000
    np.testing.assert_allclose(shares, [0, 0.8, 0, 0.2], atol=0.03)
    greedy = draw("greedy", jnp.float32(0), jnp.float32(1), jnp.uint32(0), jnp.int32(0))
    assert (greedy == 1).all()


@pytest.mark.parametrize(
    ("temperature", "top_p", "expected"),
    [
        (1e-38, 1.0, [0, 1, 0, 0]),  # less than the smallest normal number
        (1e-300, 0.9, [0, 1, 0, 0]),
        (1.0, 1e-40, [0, 1, 0, 0]),
        (1.0, 1e-300, [0, 1, 0, 0]),
        (1e300, 1.0, [0.25] * 4),
    ],
)
def test_extreme_options_have_the_limit_of_moderate_ones(temperature, top_p, expected):
    every = [GenerateOptions(temperature=temperature, top_p=top_p, seed=n) for n in range(400)]
    shares = np.bincount([first_token(LOGITS, x)[0] for x in every], minlength=4) / 400
    np.testing.assert_allclose(shares, expected, atol=0.08)


def test_each_row_has_its_own_most_likely_token():
    log_probs, is_argmax = judge(jnp.concatenate([LOGITS, LOGITS[:, ::-1]]), jnp.array([1, 1]))
    np.testing.assert_allclose(log_probs, np.log([0.5, 0.15]), rtol=1e-6)
    assert is_argmax.tolist() == [True, False]


def test_logits_that_are_not_finite_give_no_token():
    nan, inf = jnp.nan, jnp.inf
    logits = jnp.array([[1, nan, 0], [1, inf, 0], [-inf] * 3, [-inf, 3, -inf]])
    for fields in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}):
        found = first_token(logits, GenerateOptions(**fields))
        assert found.tolist() == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be an integer .at least 1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5 must be an integer"),
        ({"temperature": -1.0}, "temperature=-1.0 must be"),
        ({"temperature": float("nan")}, "temperature=nan must be"),
        ({"top_p": 0.0}, "top_p=0.0 must be .*greater than 0 and at most 1"),
        ({"seed": -1}, "seed=-1 must be an integer .at least 0"),
        ({"stop": ("a", "")}, "stop=.* must be a list of non-empty strings"),
        ({"stop": "ab"}, "stop='ab' must be a list of"),
    ],
)
def test_impossible_options_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        GenerateOptions(**fields)
