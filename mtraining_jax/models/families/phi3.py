"""Phi-3: fused projections in its checkpoints, separate parameters here; and LongRoPE."""

from collections.abc import Mapping
from typing import Any

from mtraining_jax.models.families.family import Family
from mtraining_jax.models.rope import LongRopeScaling
from mtraining_jax.models.spec import ModelSpec

_NAMES = "longrope", "su", "yarn"  # of LongRoPE in config.json


class Phi3(Family):
    """Fused projections in checkpoints, and LongRoPE."""

    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    title = "Phi-3"
    defaults = {**Family.defaults, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    fixed = {**Family.fixed, "attention_bias": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    same_as = {"num_key_value_heads": "num_attention_heads"}
    attention = ("sliding_window",)
    fused = {
        "self_attn.qkv_proj.weight": (
            "self_attn.q_proj.weight",
            "self_attn.k_proj.weight",
            "self_attn.v_proj.weight",
        ),
        "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    }

    def rope_sections(self, raw: Mapping[str, Any]) -> list[dict[str, Any]]:
        # In transformers it is longrope under three names, plain without any, and the original
        # context of the section is not used.
        original = raw.get("original_max_position_embeddings", 4096)
        longrope = {"rope_type": "longrope", "original_max_position_embeddings": original}
        return [
            {**rope, **longrope}
            if "long_factor" in rope and (rope.get("rope_type") or rope.get("type")) in _NAMES
            else rope
            for rope in super().rope_sections(raw)
        ]

    def write_config(self, spec: ModelSpec) -> dict[str, Any]:
        # transformers 4 accepts exactly three RoPE fields, and derives the factor on cos and sin
        # from the two context lengths. If the factor differs, the file is for transformers 5 only.
        raw = super().write_config(spec)
        raw["rope_parameters"]["partial_rotary_factor"] = 1.0
        scaling, context = spec.rope_scaling, spec.max_position_embeddings
        if isinstance(scaling, LongRopeScaling):
            scaled = raw["rope_scaling"]
            original = scaling.original_max_position_embeddings
            derived = None if original is None else max(1.0, context / original)
            if scaling.attention_factor is None and scaling.factor == derived:
                three = {name: scaled[name] for name in ("short_factor", "long_factor")}
                raw["rope_scaling"] = {"type": scaling.type, **three}
                del raw["rope_parameters"]["factor"]
        return raw
