"""Qwen3 mixtures of experts, such as Qwen3-30B-A3B."""

from collections.abc import Mapping
from typing import Any

from mtraining_jax.models.families.family import EXPERTS, integer
from mtraining_jax.models.families.qwen3 import Qwen3
from mtraining_jax.models.parameters import Parameter, matrix
from mtraining_jax.models.spec import ModelSpec

_PROJECTIONS = "gate_proj", "up_proj", "down_proj"


class Qwen3Moe(Qwen3):
    """The decoder of Qwen3 with a mixture of experts in each layer."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    title = "Qwen3-MoE"
    defaults = {**Qwen3.defaults, "norm_topk_prob": False, "router_aux_loss_coef": 0.001}
    # Released models have experts in all layers.
    fixed = {**Qwen3.fixed, "decoder_sparse_step": 1, "mlp_only_layers": []}
    fused = {f"mlp.experts.*.{x}.weight": (f"mlp.{x}.weight",) for x in _PROJECTIONS}
    has_experts = True

    def layer(self, spec: ModelSpec) -> dict[str, Parameter]:
        layer, experts = super().layer(spec), spec.num_experts
        for name in (f"mlp.{x}.weight" for x in _PROJECTIONS):
            one = layer[name]
            axes = "experts", *one.axes
            layer[name] = Parameter((experts, *one.shape), axes, stddev=one.stddev)
        router = matrix(experts, spec.hidden_size, ("experts", "embed"), spec.initializer_range)
        return layer | {"mlp.gate.weight": router}

    def layer_products(self, spec: ModelSpec) -> dict[str, int]:
        found = super().layer_products(spec)
        for name in (f"mlp.{x}.weight" for x in _PROJECTIONS):
            found[name] = spec.num_experts_per_tok * spec.hidden_size * spec.intermediate_size
        return found

    def read_config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        # The width of an MLP that no layer has; transformers 5 renamed the number of experts.
        raw = {**raw, "intermediate_size": raw.get("moe_intermediate_size")}
        raw["num_experts"] = raw.get("num_experts", raw.get("num_local_experts"))
        values = super().read_config(raw)
        for name in ("num_experts", "num_experts_per_tok"):
            values[name] = integer(raw, name)
        return values

    def write_config(self, spec: ModelSpec) -> dict[str, Any]:
        raw = super().write_config(spec) | {name: getattr(spec, name) for name in EXPERTS}
        raw["num_local_experts"] = spec.num_experts
        raw["moe_intermediate_size"] = raw.pop("intermediate_size")
        return raw
