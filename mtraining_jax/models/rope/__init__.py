"""Rotary frequencies, plain or scaled to a longer context.

Does not import JAX, so that configurations can be checked without it. Each scaling is a class in
its own file, registered in `ROPE_KINDS`. `mtraining_jax.models.rope.rotary` applies them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mtraining_jax.models.rope.kind import RopeScaling, Scaled
from mtraining_jax.models.rope.linear import LinearScaling
from mtraining_jax.models.rope.llama3 import Llama3Scaling
from mtraining_jax.models.rope.longrope import LongRopeScaling
from mtraining_jax.models.rope.yarn import YarnScaling

# By `rope_type` in config.json.
ROPE_KINDS: Mapping[str, type[RopeScaling]] = {
    kind.type: kind for kind in (YarnScaling, LinearScaling, Llama3Scaling, LongRopeScaling)
}

__all__ = [
    "ROPE_KINDS",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "RopeScaling",
    "YarnScaling",
    "make_scaling",
    "rope_frequencies",
]


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, *, context: int, length: int
) -> Scaled:
    """Returns frequencies float64 [D/2] in radians per token, and the factor on cos and sin.

    Some scalings depend on `context`, that of the model, and on `length`, that of the sequence.
    """
    plain = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return plain, 1.0
    return scaling.stretch(plain, theta, context, length)


def make_scaling(values: Any) -> RopeScaling | None:
    """Builds the scaling that a mapping, or any object with these attributes, describes.

    `type` (or `rope_type`) selects the class, yarn by default. None, and a `RopeScaling`, are
    returned unchanged. Raises ValueError for an unknown type or invalid values.
    """
    if values is None or isinstance(values, RopeScaling):
        return values
    raw = values if isinstance(values, Mapping) else vars(values)
    name = raw.get("type") or raw.get("rope_type") or YarnScaling.type
    if name not in ROPE_KINDS:
        raise ValueError(f'unknown type "{name}"; choose one of {", ".join(ROPE_KINDS)}')
    return ROPE_KINDS[name].from_fields(raw)
