"""Qwen3 mixtures of experts, such as Qwen3-30B-A3B."""

from collections.abc import Mapping
from typing import Any

from mtraining_jax.models.families.family import Family
from mtraining_jax.models.families.mixture import PROJECTIONS, Mixture
from mtraining_jax.models.families.qwen3 import Qwen3
from mtraining_jax.models.spec import ModelSpec


class Qwen3Moe(Mixture, Qwen3):
    """The decoder of Qwen3 with a mixture of experts in each layer."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    title = "Qwen3-MoE"
    # Unlike dense models, these have no default of the head width but hidden_size / heads.
    defaults = {**Family.defaults, "norm_topk_prob": False, "router_aux_loss_coef": 0.001}
    # Released models have experts in all layers.
    fixed = {**Qwen3.fixed, "decoder_sparse_step": 1, "mlp_only_layers": []}
    fused = {f"mlp.experts.*.{x}.weight": (f"mlp.{x}.weight",) for x in PROJECTIONS}

    def read_config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        # The other width is that of an MLP that no layer has.
        return super().read_config({**raw, "intermediate_size": raw.get("moe_intermediate_size")})

    def write_config(self, spec: ModelSpec) -> dict[str, Any]:
        raw = super().write_config(spec)
        raw["moe_intermediate_size"] = raw.pop("intermediate_size")
        return raw
