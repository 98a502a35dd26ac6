"""Checksums and digests of parameters notice every change of values, whatever the sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.models.huggingface.checksums import checksum, checksum_on_host, digest
from mtraining_jax.models.huggingface.read import check_base
from mtraining_jax.utils.errors import UserError

DTYPES = jnp.float32, jnp.bfloat16, jnp.float16
SHAPES = (2, 3), (4, 8), (3, 11), (64, 96), (1024, 1024)
RULES = {
    "negated": lambda x: -x,
    "rows permuted": lambda x: np.roll(x, 1, 0),
    "rows reversed": lambda x: x[::-1],
    "rows swapped": lambda x: x[[1, 0, *range(2, len(x))]],
    "transposed": lambda x: x.T.reshape(x.shape),
    "elements swapped": lambda x: np.r_[x.flat[-1], x.flat[1:-1], x.flat[0]].reshape(x.shape),
} | {f"times 2^{n}": lambda x, n=n: x * 2.0**n for n in (-8, -4, -3, -2, -1, 1, 2, 3, 4)}


def draw(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_change_has_another_checksum(shape, dtype):
    # Constants have the least entropy: all their bits change by the same number.
    for x in (draw(shape, dtype), np.full(shape, 1.0, dtype), np.full(shape, -0.375, dtype)):
        changed = {name: rule(x).astype(dtype) for name, rule in RULES.items()}
        different = {y.tobytes(): y for y in (x, *changed.values())}.values()
        assert len(different) > 10
        assert len({int(checksum_on_host(y)) for y in different}) == len(different)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64),
    st.integers(0, 31),
    st.integers(1, 8),
)
def test_adding_a_power_of_two_to_all_bits_is_noticed(values, power, times):
    bits = np.tile(np.array(values, np.uint32), 32 * times)
    changed = bits + np.uint32(1 << power)
    assert checksum_on_host(bits) != checksum_on_host(changed)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_one_changed_or_two_swapped_numbers_are_noticed(data):
    x = np.arange(data.draw(st.integers(2, 5000)), dtype=np.uint32)
    i, j = (data.draw(st.integers(0, x.size - 1)) for _ in range(2))
    flipped, swapped = x.copy(), x.copy()
    flipped[i] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    swapped[[i, j]] = x[[j, i]]
    assert checksum_on_host(flipped) != checksum_on_host(x)
    assert (checksum_on_host(swapped) == checksum_on_host(x)) == (i == j)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8,), (16, 24), (8, 8, 6)])
def test_sharding_and_memory_do_not_matter(shape, dtype):
    x = draw(shape, dtype)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = [P(), P("a"), P("b"), P(("b", "a"))] + ([P("a", "b"), P(None, "a")] * (len(shape) > 1))
    arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for spec in specs]
    sums = {int(jax.jit(checksum)(y)) for y in arrays}
    assert sums == {int(checksum_on_host(x))}
    for exact in (False, True):
        assert len({digest({"x": y}, exact=exact) for y in arrays}) == 1


def test_digests_notice_names_and_values():
    x, y = (jnp.asarray(draw((32, 32), jnp.float32, seed)) for seed in range(2))
    rounded = x.astype(jnp.bfloat16)
    for exact in (False, True):
        found = [
            digest(parameters, exact=exact)
            for parameters in (
                {"x": x, "y": y}, {"x": y, "y": x}, {"x": x}, {"y": x}, {"x": 2 * x}, {"x": -x},
                {"x": x, "y": 2 * y}, {"x": 2 * x, "y": y},
            )
        ]  # fmt: skip
        assert len(set(found)) == len(found)
        assert digest({"y": y, "x": x}, exact=exact) == found[0]
        assert (digest({"x": x}, exact=exact) == digest({"x": rounded}, exact=exact)) == (not exact)


def test_a_digest_of_another_version_is_not_called_another_base():
    base = {"x": jnp.asarray(draw((32, 32), jnp.float32))}
    check_base("adapters", digest(base), base)
    check_base("adapters", None, base)
    with pytest.raises(UserError, match="^adapters has adapters of another base model: it needs"):
        check_base("adapters", digest({"x": 2 * base["x"]}), base)
    sentence = "^adapters identifies its base model by the digest v3-01 of another version of"
    with pytest.raises(UserError, match=sentence):
        check_base("adapters", "v3-01", base)
    check_base("adapters", digest(base, version=1), base)
    with pytest.raises(UserError, match="^adapters has adapters of another base model: it needs"):
        check_base("adapters", digest({"x": 1.1 * base["x"]}, version=1), base)


def test_digests_in_files_keep_their_values():
    """Other values need another `CHECKSUM_VERSION`."""
    x = jnp.asarray(np.arange(12, dtype=np.float32).reshape(3, 4) / 7)
    assert [int(checksum(y)) for y in (x, x.astype(jnp.bfloat16))] == [3669562449, 544717710]
    assert digest({"x": x}) == "v2-652906d0ba574b13" != digest({"x": x}, exact=True)
    bits = np.asarray(x).view(np.uint32).ravel().tolist()
    assert checksum(x, 1) == sum(b * (2 * n + 1) for n, b in enumerate(bits)) % 2**32
    assert "-" not in digest({"x": x}, version=1)
