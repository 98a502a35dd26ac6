"""Expected results of kernel calls, and their tolerances."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import pallas_kernels
from pallas_kernels.reference import reference_attention

FP32_EPS = float(jnp.finfo(jnp.float32).eps)


@dataclasses.dataclass(frozen=True)
class Expected:
    """A result of the oracle, with the size of the terms of each element's sum."""

    value: Array
    size: Array  # root of the sum of the squared terms, before cancellation


jax.tree_util.register_dataclass(Expected)


def oracle(
    q: Array, k: Array, v: Array, dout: Array, mask: np.ndarray, scale: float | None = None
) -> dict[str, Expected | Array]:
    """The oracle's out, lse, dq, dk, dv in fp32, from the same rounded inputs."""
    tiny = float(jnp.finfo(q.dtype).tiny)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _oracle(*(x.astype(jnp.float32) for x in (q, k, v, dout)), mask, scale, tiny)


@jax.jit
def _oracle(q, k, v, dout, mask, scale, tiny) -> dict[str, Expected | Array]:
    """Computes `oracle` for fp32 inputs; `tiny` bounds the rounding of P and dS from below."""
    out, vjp, lse = jax.vjp(
        lambda q, k, v: reference_attention(q, k, v, mask, scale), q, k, v, has_aux=True
    )
    dq, dk, dv = vjp(dout)

    group = q.shape[2] // k.shape[2]
    keys, values = (jnp.repeat(x, group, axis=2) for x in (k, v))
    logits = scale * jnp.einsum("bqhd,bkhd->bhqk", q, keys)
    p = jnp.where(mask, jnp.exp(logits - lse[..., None]), 0.0)
    dp = jnp.einsum("bqhd,bkhd->bhqk", dout, values)
    delta = pallas_kernels.delta_of(out, dout)
    # delta sums terms that may cancel, with an output that was rounded.
    delta_squared = delta**2 + pallas_kernels.delta_of(out**2, dout**2)
    p_squared = jnp.where(mask, jnp.maximum(p, tiny) ** 2, 0.0)
    ds_squared = (scale * p) ** 2 * (dp**2 + delta_squared[..., None])
    ds_squared = jnp.where(mask, jnp.maximum(ds_squared, tiny**2), 0.0)

    def of_rows(terms, x):
        return jnp.sqrt(jnp.einsum("bhqk,bkhd->bqhd", terms, x**2))

    def of_keys(terms, x):
        squares = jnp.einsum("bhqk,bqhd->bkhd", terms, x**2)
        return jnp.sqrt(squares.reshape(*k.shape[:3], group, -1).sum(3))

    return {
        "lse": lse,
        "out": Expected(out, of_rows(p_squared, values)),
        "dq": Expected(dq, of_rows(ds_squared, keys)),
        "dk": Expected(dk, of_keys(ds_squared, q)),
        "dv": Expected(dv, of_keys(p_squared, dout)),
    }


def exact_sums(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    delta: Array,
    tile_mask: np.ndarray,
    column_kv: tuple[Array, Array] | None = None,
    column_mask: np.ndarray | None = None,
) -> dict[str, np.ndarray | None]:
    """The results for counting inputs: P = 1 on every pair and dS = dP - delta, all integers.

    Args:
        q, dout: [B, nq, Hq, D].
        k, v: [B, nk, Hk, D].
        delta: [B, Hq, nq].
        tile_mask: bool [B, Hq, nq, nk], the pairs of the tiles.
        column_kv: keys and values of gathered columns.
        column_mask: bool [B, Hq, nq, Mv], the pairs of the columns.

    Returns:
        count [B, Hq, nq] of pairs, sum [B, nq, Hq, D] of values, and the fields of `Gradients`.
    """
    q, k, v, dout, delta = (np.asarray(x, np.float32) for x in (q, k, v, dout, delta))
    group = q.shape[2] // k.shape[2]
    result = {
        "count": np.zeros(delta.shape),
        "sum": np.zeros_like(q),
        "dq": np.zeros_like(q),
        "dk": np.zeros_like(k),
        "dv": np.zeros_like(v),
        "dk_columns": None,
        "dv_columns": None,
    }
    shares = [(k, v, tile_mask, "dk", "dv", group)]
    if column_kv is not None:
        columns = [np.asarray(x, np.float32) for x in column_kv]
        shares.append((*columns, column_mask, "dk_columns", "dv_columns", 1))
        result |= {name: np.zeros_like(columns[0]) for name in shares[1][3:5]}
    for (keys, values, mask, dk, dv, group), b, h in itertools.product(
        shares, range(q.shape[0]), range(q.shape[2])
    ):
        pairs = mask[b, h].astype(np.float32)
        ours, theirs = (b, slice(None), h), (b, slice(None), h // group)
        ds = pairs * (dout[ours] @ values[theirs].T - delta[b, h][:, None])
        result["count"][b, h] += pairs.sum(-1)
        result["sum"][ours] += pairs @ values[theirs]
        result["dq"][ours] += ds @ keys[theirs]
        result[dk][theirs] += ds.T @ q[ours]
        result[dv][theirs] += pairs.T @ dout[ours]
    return result


def compare(
    name: str, actual: Array, expected: Expected, dtype: jnp.dtype, more: float = 0.0
) -> None:
    """Compares [B, n, H, D] per element, relative to the terms of its sum.

    Inputs are exact. P, dS and the result are rounded to `dtype`, by at most eps / 2 each and
    independently, and sums are in fp32: the mean error of an element is a fraction of eps times its
    size, and the largest of many is some sigmas. `more` is added to eps.
    """
    info = jnp.finfo(dtype)
    eps = max(float(info.eps), 16 * FP32_EPS) + more
    actual, value, size = (
        np.asarray(x, np.float64) for x in (actual, expected.value, expected.size)
    )
    assert actual.shape == value.shape, f"{name}: {actual.shape} and {value.shape}"
    error = np.abs(actual - value)
    unit = eps * np.hypot(np.maximum(np.abs(value), float(info.tiny)), size)
    wrong = ~(error <= 3 * unit)
    assert not wrong.any(), (
        f"{name}: {wrong.sum()} of {wrong.size} elements are off by more than 3 eps, first at "
        f"[batch, token, head, dim] = {np.argwhere(wrong)[0].tolist()}"
    )
    error, unit = (np.sqrt(np.square(x).mean((1, 3))) for x in (error, unit))
    assert (error <= 0.5 * unit).all(), (
        f"{name}: heads are off by up to {np.max(error / unit):.2g} eps in the mean"
    )


def compare_on_device(actual: dict[str, Array], expected: dict[str, Expected]) -> None:
    """Applies `compare` to all results: in NumPy only where fp32 on the device does not settle it.

    For large results of few shapes: NumPy takes a second for a million elements, and each new shape
    on the device compiles a program.
    """
    settled = _well_within(actual, {name: expected[name] for name in actual})
    for name, x in actual.items():
        if not settled[name]:
            compare(name, x, expected[name], x.dtype)


@jax.jit
def _well_within(actual: dict[str, Array], expected: dict[str, Expected]) -> dict[str, Array]:
    """Whether errors are so far within the limits of `compare` that fp32 is precise enough."""

    def within(x, wanted):
        info = jnp.finfo(x.dtype)
        eps = max(float(info.eps), 16 * FP32_EPS)
        error = jnp.abs(x.astype(jnp.float32) - wanted.value)
        unit = eps * jnp.hypot(jnp.maximum(jnp.abs(wanted.value), float(info.tiny)), wanted.size)
        of_head, limit = (jnp.sqrt(jnp.square(y).mean((1, 3))) for y in (error, unit))
        # Squares of smaller units would underflow.
        means = (of_head <= 0.45 * limit) & (limit > 1e-15)
        exact = error.max((1, 3)) == 0
        return (error <= 2.8 * unit).all() & (means | exact).all()

    return {name: within(x, expected[name]) for name, x in actual.items()}


def compare_lse(actual: Array, expected: Array, more: float = 0.0) -> None:
    """Uses one tolerance for all dtypes: logits sum exact products in fp32. `more` adds to it."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-5 + more, err_msg="lse")


def assert_same_bits(a: dict[str, Array], b: dict[str, Array]) -> None:
    for name in a:
        assert np.asarray(a[name]).tobytes() == np.asarray(b[name]).tobytes(), name
