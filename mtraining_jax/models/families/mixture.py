"""What families with a mixture of experts in each layer share."""

from collections.abc import Mapping
from typing import Any

from mtraining_jax.models.families.family import EXPERTS, Family, integer
from mtraining_jax.models.parameters import Parameter, matrix
from mtraining_jax.models.spec import ModelSpec

PROJECTIONS = "gate_proj", "up_proj", "down_proj"


class Mixture(Family):
    """A router and experts instead of the MLP; a base next to the family of the other parts."""

    has_experts = True

    def layer(self, spec: ModelSpec) -> dict[str, Parameter]:
        layer, experts = super().layer(spec), spec.num_experts
        for name in (f"mlp.{x}.weight" for x in PROJECTIONS):
            one = layer[name]
            axes = "experts", *one.axes
            layer[name] = Parameter((experts, *one.shape), axes, stddev=one.stddev)
        router = matrix(experts, spec.hidden_size, ("experts", "embed"), spec.initializer_range)
        return layer | {"mlp.gate.weight": router}

    def layer_products(self, spec: ModelSpec) -> dict[str, int]:
        found = super().layer_products(spec)
        for name in (f"mlp.{x}.weight" for x in PROJECTIONS):
            found[name] = spec.num_experts_per_tok * spec.hidden_size * spec.intermediate_size
        return found

    def read_config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        # transformers 5 renamed the number of experts.
        counts = {raw[x] for x in ("num_experts", "num_local_experts") if raw.get(x) is not None}
        if len(counts) > 1:
            raise ValueError("num_experts and num_local_experts contradict each other")
        raw = {**raw, "num_experts": next(iter(counts), None)}
        values = super().read_config(raw)
        for name in ("num_experts", "num_experts_per_tok"):
            values[name] = integer(raw, name)
        return values

    def write_config(self, spec: ModelSpec) -> dict[str, Any]:
        raw = super().write_config(spec) | {name: getattr(spec, name) for name in EXPERTS}
        return raw | {"num_local_experts": spec.num_experts}
