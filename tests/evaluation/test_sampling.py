import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.data.tokenizer import ByteTokenizer
from mtraining_jax.evaluation.engine.options import GenerateOptions
from mtraining_jax.evaluation.engine.sampling import kept_tokens, next_token
from mtraining_jax.evaluation.engine.text import GrowingText, settled_length
from mtraining_jax.utils.errors import UserError

LOGITS = jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25]]))


def test_the_fewest_likely_tokens_with_the_probability_are_kept():
    for top_p, kept in [(0.4, [1]), (0.6, [1, 3]), (0.76, [1, 2, 3]), (1.0, [0, 1, 2, 3])]:
        found = np.flatnonzero(kept_tokens(LOGITS, jnp.float32(top_p))[0])
        assert found.tolist() == kept, top_p


def test_tokens_are_sampled_by_their_probability_and_reproducibly():
    many = jnp.broadcast_to(LOGITS, (4000, 4))
    draw = lambda *how: np.asarray(next_token(many, *how))  # noqa: E731
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


def test_text_is_reported_when_it_is_final():
    reported = []
    text = GrowingText(ByteTokenizer(), ("END",), reported.append)
    for token in "é, E so EN".encode():
        text.add(token)
    # Half of é is not a character, and EN may become END.
    assert reported[0] == "é" and "".join(reported) == "é, E so "
    for token in b"D, more":
        text.add(token)
    assert text.stopped and text.end() == "é, E so " == "".join(reported)
    assert settled_length("abc", ("bcd", "x")) == 1
    assert settled_length("abc", ()) == 3


def test_without_a_stop_text_all_is_reported_at_the_end():
    reported = []
    text = GrowingText(ByteTokenizer(), ("END",), reported.append)
    for token in b"an EN":
        text.add(token)
    assert text.end() == "an EN" == "".join(reported)
