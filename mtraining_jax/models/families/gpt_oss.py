"""gpt-oss (bf16 weights): windows in every other layer, attention sinks, experts with biases."""

from collections.abc import Mapping
from typing import Any

from mtraining_jax.models.families.family import Family, full_interval, layer_types
from mtraining_jax.models.families.mixture import PROJECTIONS, Mixture
from mtraining_jax.models.parameters import Parameter, vector
from mtraining_jax.models.spec import ModelSpec

_TENSORS = "mlp.experts."
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


class GptOss(Mixture):
    """Windows, a sink per head, biases everywhere, and experts with a clamped SwiGLU."""

    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    title = "gpt-oss"
    defaults = {
        **Family.defaults,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "router_aux_loss_coef": 0.001,
    }
    fixed = {
        **Family.fixed,
        "attention_bias": True,
        "norm_topk_prob": True,  # softmax over the selected experts is the same
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }
    attention = "sliding_window", "full_attention_interval"
    has_sinks = True
    activation = "clamped_swiglu"
    fused = {
        _TENSORS + "gate_up_proj": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        _TENSORS + "gate_up_proj_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        _TENSORS + "down_proj": ("mlp.down_proj.weight",),
        _TENSORS + "down_proj_bias": ("mlp.down_proj.bias",),
        "mlp.router.weight": ("mlp.gate.weight",),
        "mlp.router.bias": ("mlp.gate.bias",),
    }
    alternating = tuple(fused)[:4]

    def layer(self, spec: ModelSpec) -> dict[str, Parameter]:
        layer = super().layer(spec)
        for name in (f"self_attn.{x}_proj" for x in "qkvo"):
            layer[f"{name}.bias"] = vector(layer[f"{name}.weight"].shape[0], 0.0)
        layer["self_attn.sinks"] = vector(spec.num_heads, 0.0)
        layer["mlp.gate.bias"] = vector(spec.num_experts, 0.0)
        for name in (f"mlp.{x}" for x in PROJECTIONS):
            size = layer[f"{name}.weight"].shape[:2]
            layer[f"{name}.bias"] = Parameter(size, ("experts", "vector"))
        return layer

    def read_config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        raw = {"sliding_window": 128, "head_dim": 64, **raw}
        # As in transformers, a config.json without a RoPE section has that of released models.
        if raw.get("rope_parameters") is None and not raw.get("rope_scaling"):
            raw["rope_parameters"] = _YARN
        values = super().read_config(raw)
        interval = full_interval(raw, values["num_layers"], 2)
        if values["sliding_window"] is not None or interval != 1:
            values["full_attention_interval"] = interval
        return values

    def write_config(self, spec: ModelSpec) -> dict[str, Any]:
        return super().write_config(spec) | {"layer_types": layer_types(spec)}
