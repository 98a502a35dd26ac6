"""Gemma 3 (text): most layers with a sliding window and a RoPE of their own; four norms a layer."""

from collections.abc import Mapping
from typing import Any

from mtraining_jax.models.families.family import (
    FULL,
    SLIDING,
    Family,
    full_interval,
    layer_types,
    read_rope,
)
from mtraining_jax.models.parameters import Parameter, vector
from mtraining_jax.models.spec import ATTENTION, ModelSpec


class Gemma3(Family):
    """Windows, norms also after attention and the MLP, GeGLU, and scaled embeddings."""

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    title = "Gemma 3"
    defaults = {
        **Family.defaults,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "query_pre_attn_scalar": 256,
    }
    fixed = {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_dropout": 0.0,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    }
    attention = ATTENTION
    activation = "gelu_pytorch_tanh"
    norm_offset = 1.0
    scales_embedding = True

    def layer(self, spec: ModelSpec) -> dict[str, Parameter]:
        norms = {f"self_attn.{x}_norm.weight": vector(spec.head_dim, 0.0) for x in "qk"}
        for place in ("pre", "post"):
            norms[f"{place}_feedforward_layernorm.weight"] = vector(spec.hidden_size, 0.0)
        return super().layer(spec) | norms

    def read_config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        values = super().read_config({"sliding_window": 4096, "head_dim": 256, **raw})
        default = raw.get("sliding_window_pattern") or 6
        interval = full_interval(raw, values["num_layers"], default)
        if values["sliding_window"] is None and interval == 1:
            return values
        values["full_attention_interval"] = interval
        rope = (raw.get("rope_parameters") or {}).get(SLIDING) or {}
        base = raw.get("rope_local_base_freq")
        base = 10000.0 if base is None else base
        theta, scaling = read_rope({"rope_theta": base, **rope}, {**self.defaults, **raw})
        if (theta, scaling) == (values["rope_theta"], values["rope_scaling"]):
            return values
        if scaling is not None:
            raise ValueError(f"rope_type={scaling.type} of {SLIDING} must be default")
        return values | {"window_rope_theta": theta}

    def rope_sections(self, raw: Mapping[str, Any]) -> list[dict[str, Any]]:
        rope, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
        if not isinstance(rope, dict) or not isinstance(scaling, dict):
            raise ValueError("rope_parameters and rope_scaling must be objects")
        # transformers ignores both.
        if other := sorted(rope.keys() - {FULL, SLIDING}):
            raise ValueError(f"rope_parameters has {other[0]} outside of {FULL} and {SLIDING}")
        if "type" in scaling and "rope_type" not in scaling:
            raise ValueError('rope_scaling has "type"; rename it to "rope_type"')
        return [{**(rope.get(FULL) or {}), **scaling}]

    def write_config(self, spec: ModelSpec) -> dict[str, Any]:
        raw, theta = super().write_config(spec), spec.window_rope_theta
        full = raw["rope_parameters"]
        local = full if theta is None else {"rope_type": "default", "rope_theta": theta}
        return raw | {
            "query_pre_attn_scalar": spec.query_pre_attn_scalar or spec.head_dim,
            "layer_types": layer_types(spec),
            "sliding_window_pattern": spec.full_attention_interval or spec.num_layers + 1,
            "rope_local_base_freq": local["rope_theta"],
            "rope_parameters": {FULL: full, SLIDING: local},
        }
