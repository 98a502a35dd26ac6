"""Fuzzing helpers: corrupt files, and the allowed outcomes of reading them."""

import os
from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from mtraining_jax.utils.errors import UserError

EXAMPLES = int(os.environ.get("MTRAINING_FUZZ", "40"))
FUZZ = settings(
    max_examples=EXAMPLES,
    derandomize="MTRAINING_FUZZ" not in os.environ,
    database=None,
    # Ten seconds for a kilobyte count as a hang.
    deadline=10_000,
    suppress_health_check=list(HealthCheck),
)

# Arbitrary JSON values, with numeric edge cases.
ODD = st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 1e308, 1e-320, 0.5, 10**400])
SCALAR = st.none() | st.booleans() | ODD | st.text(max_size=8) | st.floats()
ANYTHING = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)


def damaged(whole: bytes) -> st.SearchStrategy[bytes]:
    """Strategy: bytes changed, removed or inserted; truncated; or random content."""
    place = st.integers(0, len(whole))
    change = st.tuples(place, st.integers(0, 8), st.binary(max_size=8))

    def apply(changes: list[tuple[int, int, bytes]]) -> bytes:
        content = bytearray(whole)
        for at, removed, put in changes:
            content[at : at + removed] = put
        return bytes(content)

    return (
        st.lists(change, min_size=1, max_size=4).map(apply)
        | place.map(lambda end: whole[:end])
        | st.binary(max_size=64)
    )


def otherwise(table: object) -> st.SearchStrategy[object]:
    """Strategy: a JSON value with one or two parts replaced."""
    places = []

    def collect(value, path):
        places.append(path)
        keys = (
            value
            if isinstance(value, dict)
            else range(len(value))
            if isinstance(value, list)
            else ()
        )
        for key in keys:
            collect(value[key], (*path, key))

    collect(table, ())

    def replace(value, path, new):
        if not path:
            return new
        head, *rest = path
        if isinstance(value, dict) and head in value:
            return value | {head: replace(value[head], rest, new)}
        if isinstance(value, list) and isinstance(head, int) and head < len(value):
            return [*value[:head], replace(value[head], rest, new), *value[head + 1 :]]
        return value

    def apply(changes):
        result = table
        for path, new in changes:
            result = replace(result, list(path), new)
        return result

    change = st.tuples(st.sampled_from(places), ANYTHING)
    return st.lists(change, min_size=1, max_size=2).map(apply)


def result_of(read: Callable[[], object]) -> object:
    """Result of a reader, or None after a UserError; any other exception is a failure."""
    try:
        return read()
    except UserError as error:
        assert str(error).strip()
        assert "Traceback" not in str(error)
        assert max(map(len, str(error).splitlines())) < 700, str(error)
        return None
