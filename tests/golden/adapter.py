"""The package as these tests call it: the only file that a change of its public calls touches."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType

import mtraining_jax
from mtraining_jax import (
    Config,
    Documents,
    Sharding,
    sequence_layout,
    sparse_attention,
    stripe,
    unstripe,
)
from mtraining_jax.config import validate
from tests.training.common import run


class Results(NamedTuple):
    """NumPy arrays in sequence order."""

    index: np.ndarray  # bool [B, Hq, S, S] or [1, 1, S, S], the pairs that are computed
    out: np.ndarray  # [B, S, Hq, D]
    lse: np.ndarray  # fp32 [B, Hq, S]
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsinks: np.ndarray | None  # fp32 [Hq]


def attention(
    pattern: str,
    fields: dict[str, Any],
    *,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray,
    dlse: np.ndarray,
    sinks: np.ndarray | None = None,
    lengths: list[list[int]] | None = None,
    valid_len: int | None = None,
    mesh_shape: tuple[int, int, int] | None = None,
    layout: str = "striped",
    ring: str = "gather",
    causal: bool = True,
) -> Results:
    """Computes attention and its gradients.

    Args:
        pattern: public name of the pattern's class.
        fields: its fields.
        q, k, v, sinks: as in `sparse_attention`, in sequence order.
        dout, dlse: gradients of its results.
        lengths: tokens of the documents packed into each sequence.
        valid_len: tokens before the padding of every sequence.
        mesh_shape: replicas, nodes and devices per node; None: one device.
        layout, ring: order of tokens, and communication, on the mesh.
        causal: whether later keys are excluded.
    """
    selects = getattr(mtraining_jax, pattern)(**fields)
    seq_len, block_size = q.shape[1], selects.block_size
    options: dict[str, Any] = {"pattern": selects, "causal": causal}
    if valid_len is not None:
        options["documents"] = Documents.padded(valid_len, seq_len, block_size)
    if lengths is not None:
        options["documents"] = Documents.from_lengths(lengths, seq_len, block_size)
    order = None
    if mesh_shape is not None:
        axes = "data", "node", "device"
        mesh = jax.make_mesh(mesh_shape, axes, axis_types=(AxisType.Auto,) * 3)
        order = sequence_layout(seq_len, mesh, kind=layout, block_size=block_size, ring=ring)
        options["sharding"] = Sharding(mesh, order=order, ring=ring)
        q, k, v, dout = (stripe(x, order) for x in (q, k, v, dout))
        dlse = stripe(dlse, order, axis=2)

    def attend(q, k, v, sinks):
        out, residuals = sparse_attention(q, k, v, sinks=sinks, return_residuals=True, **options)
        return (out, residuals.lse), residuals.index

    @jax.jit
    def with_gradients(q, k, v, sinks, dout, dlse):
        results, pull_back, index = jax.vjp(attend, q, k, v, sinks, has_aux=True)
        return results, pull_back((dout, dlse)), index

    computed = jax.device_get(with_gradients(q, k, v, sinks, dout, dlse))
    (out, lse), (dq, dk, dv, dsinks), index = computed
    if order is not None:
        out, dq, dk, dv = (unstripe(x, order) for x in (out, dq, dk, dv))
        lse = unstripe(lse, order, axis=2)
    return Results(np.asarray(index.to_mask(seq_len)), out, lse, dq, dk, dv, dsinks)


def train(table: dict[str, dict[str, Any]]) -> list[dict[str, float]]:
    """Trains as configured, from the newest checkpoint if there is one; returns a record a step."""
    config = Config.from_record(table, "tests/golden")
    validate(config)
    return run(config)
