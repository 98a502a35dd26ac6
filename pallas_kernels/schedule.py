"""Differentiable attention over a static schedule: the only place that defines its gradient."""

import functools
from typing import Any, Protocol

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import names
from pallas_kernels.checks import Shaped
from pallas_kernels.interface import Pair
from pallas_kernels.ops import delta_of

Triple = tuple[Array, Array, Array]


class Schedule(Protocol):
    """How attention is carried out: on one device, by heads, around a ring; static and hashable.

    q is [B, n, Hq, D], k and v are [B, m, Hk, D], of this device. `work` is a pytree that both
    passes share, such as work lists.
    """

    @property
    def backend(self) -> str | None: ...

    def prepare(self, q: Shaped, k: Shaped, index: Any) -> Any:
        """Returns `work`; of q and k only shapes and dtypes are read."""
        ...

    def forward(self, q: Array, k: Array, v: Array, work: Any) -> Pair:
        """Returns out, like q, and lse, fp32 [B, Hq, n]."""
        ...

    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, work: Any, lse: Array, delta: Array
    ) -> Triple:
        """Returns dq, dk and dv, given lse and delta [B, Hq, n] of the whole rows."""
        ...


def attend(schedule: Schedule, q: Array, k: Array, v: Array, index: Any) -> Pair:
    """Computes out and lse of the pairs of an index; differentiable in q, k and v."""
    return _attend(schedule, q, k, v, schedule.prepare(q, k, index))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(schedule, q, k, v, work):
    return _forward(schedule, q, k, v, work)[0]


def _forward(schedule, q, k, v, work):
    out, lse = schedule.forward(q, k, v, work)
    out, lse = checkpoint_name(out, names.OUTPUT), checkpoint_name(lse, names.LSE)
    return (out, lse), (q, k, v, work, out, lse)


@jax.numpy_rank_promotion("allow")
def _backward(schedule, residuals, cotangents):
    (q, k, v, work, out, lse), (dout, dlse) = residuals, cotangents
    # d lse / d logits are the softmax weights, so the cotangent of lse is folded into delta.
    delta = delta_of(out, dout, backend=schedule.backend) - dlse
    return *schedule.backward(q, k, v, dout, work, lse, delta), None


_attend.defvjp(_forward, _backward)
