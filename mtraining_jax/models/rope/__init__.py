"""Rotary frequencies, plain or scaled to a longer context; without JAX, except for `rotary.py`."""

from collections.abc import Mapping
from typing import Any

from mtraining_jax.models.rope.kind import LinearScaling, RopeScaling
from mtraining_jax.models.rope.llama3 import Llama3Scaling
from mtraining_jax.models.rope.longrope import LongRopeScaling
from mtraining_jax.models.rope.yarn import YarnScaling
from mtraining_jax.utils.text import choose_one_of

# By `rope_type` in config.json.
ROPE_KINDS: Mapping[str, type[RopeScaling]] = {
    kind.type: kind for kind in (YarnScaling, LinearScaling, Llama3Scaling, LongRopeScaling)
}


def make_scaling(values: Any) -> RopeScaling | None:
    """Builds the scaling that a mapping or object describes; `type` selects it, yarn by default."""
    if values is None or isinstance(values, RopeScaling):
        return values
    raw = values if isinstance(values, Mapping) else vars(values)
    name = raw.get("type") or raw.get("rope_type") or YarnScaling.type
    if name not in ROPE_KINDS:
        raise ValueError(f'unknown type "{name}"; {choose_one_of(str(name), ROPE_KINDS)}')
    return ROPE_KINDS[name].from_fields(raw)
