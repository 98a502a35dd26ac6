"""The interface of a model family, with defaults that most decoders share."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from mtraining_jax.models.families import FAMILIES
from mtraining_jax.models.parameters import LAYERS, Parameter, ParamTable, matrix, vector
from mtraining_jax.models.rope import ROPE_KINDS, LongRopeScaling, RopeScaling
from mtraining_jax.models.spec import ATTENTION, ModelSpec

Activation = Literal["silu", "gelu_pytorch_tanh", "clamped_swiglu"]
# Kinds of layers in config.json.
SLIDING, FULL = "sliding_attention", "full_attention"
# Names of sizes here, and in config.json.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
}


# Fields of every config.json of transformers, like `Family.fixed`.
_SHARED = {"is_causal": True, "per_layer_config": None}
_ORIGINAL = "original_max_position_embeddings"

# Fields of a mixture of experts, with the values of a model without one.
EXPERTS = {
    "num_experts": 0, "num_experts_per_tok": 0, "norm_topk_prob": True, "router_aux_loss_coef": 0.0,
}  # fmt: skip


class Family:
    """A pre-norm decoder: attention with RoPE, then a SwiGLU MLP; subclasses define differences.

    Attributes:
        model_type, architecture: as in config.json.
        title: display name.
        defaults: defaults of transformers for fields missing in config.json.
        fixed: fields of config.json that must have these values, or be absent.
        same_as: fields of config.json that default to the value of another field.
        attention: fields of `spec.ATTENTION` that its models have.
        activation: activation of the MLP, see `swiglu.gated`.
        norm_offset: number that norms add to their weight.
        has_sinks: whether heads have attention sinks.
        scales_embedding: whether embeddings are multiplied by the square root of their width.
        fused: tensors of a checkpoint layer that stack several parameters; a name with * is one
            tensor per expert.
        alternating: those of `fused` that have all experts, [G, in, out], with columns in which the
            parameters alternate.
        has_experts: whether a mixture of experts replaces the MLP.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    title: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "rope_theta": 10000.0,
    }
    fixed: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "attention_dropout": 0.0}
    same_as: ClassVar[Mapping[str, str]] = {}
    attention: ClassVar[tuple[str, ...]] = ()
    activation: ClassVar[Activation] = "silu"
    norm_offset: ClassVar[float] = 0.0
    has_sinks: ClassVar[bool] = False
    scales_embedding: ClassVar[bool] = False
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    alternating: ClassVar[tuple[str, ...]] = ()
    has_experts: ClassVar[bool] = False

    def layer(self, spec: ModelSpec) -> dict[str, Parameter]:
        """The parameters of one layer without adapters, by their name in it; matrices [out, in]."""
        hidden, inner, std = spec.hidden_size, spec.intermediate_size, spec.initializer_range
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        return {
            "input_layernorm.weight": vector(hidden, 1.0 - self.norm_offset),
            "self_attn.q_proj.weight": matrix(queries, hidden, ("heads", "embed"), std),
            "self_attn.k_proj.weight": matrix(keys, hidden, ("kv_heads", "embed"), std),
            "self_attn.v_proj.weight": matrix(keys, hidden, ("kv_heads", "embed"), std),
            "self_attn.o_proj.weight": matrix(hidden, queries, ("embed", "heads"), std),
            "post_attention_layernorm.weight": vector(hidden, 1.0 - self.norm_offset),
            "mlp.gate_proj.weight": matrix(inner, hidden, ("mlp", "embed"), std),
            "mlp.up_proj.weight": matrix(inner, hidden, ("mlp", "embed"), std),
            "mlp.down_proj.weight": matrix(hidden, inner, ("embed", "mlp"), std),
        }

    def parameters(self, spec: ModelSpec) -> ParamTable:
        """All parameters by dotted name, with stacked layers; the decoder has exactly these."""
        std = spec.initializer_range
        embedding = matrix(spec.vocab_size, spec.hidden_size, ("vocab", "embed"), std)
        table = {"embed_tokens.weight": embedding}
        for name, x in spec.layer.items():
            shape, axes = (spec.num_layers, *x.shape), ("layers", *x.axes)
            table[f"{LAYERS}{name}"] = dataclasses.replace(x, shape=shape, axes=axes)
        table["norm.weight"] = vector(spec.hidden_size, 1.0 - self.norm_offset)
        if not spec.tie_word_embeddings:
            table["lm_head.weight"] = embedding
        return table

    def layer_products(self, spec: ModelSpec) -> dict[str, int]:
        """The multiplications per token with each matrix of a layer, by name."""
        matrices = {x: y for x, y in self.layer(spec).items() if "vector" not in y.axes}
        return {name: x.size for name, x in matrices.items() if len(x.shape) == 2}

    def layer_tensors(self, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
        """The tensors of a checkpoint layer, with the parameters in each of them."""
        stacked = {part for parts in self.fused.values() for part in parts}
        others = {name: (name,) for name in self.layer(spec) if name not in stacked}
        return {**others, **self.fused}

    def read_config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `ModelSpec` that config.json determines; ValueError if unsupported."""
        for name, needed in {**_SHARED, **self.fixed}.items():
            if raw.get(name, needed) != needed:
                given, needed = json.dumps(raw[name]), json.dumps(needed)
                raise ValueError(f"{name}={given} is unsupported; it must be {needed}")
        for name, default in self.defaults.items():
            value, is_bool = raw.get(name, default), isinstance(default, bool)
            if isinstance(value, bool) != is_bool or not isinstance(value, int | float):
                kind = "true or false" if is_bool else "a number"
                raise ValueError(f"{name}={json.dumps(value)} must be {kind}")
        others = {name: raw.get(other) for name, other in self.same_as.items()}
        given = {name: value for name, value in raw.items() if value is not None}
        raw = {**self.defaults, **others, **given}
        values: dict[str, Any] = {"family": self.model_type, **EXPERTS}
        values |= dict.fromkeys(ATTENTION)
        values |= {ours: integer(raw, theirs) for ours, theirs in SIZES.items()}
        values |= {name: raw[name] for name in self.defaults}
        if "sliding_window" in self.attention and raw.get("sliding_window") is not None:
            values["sliding_window"] = integer(raw, "sliding_window")
        self._check_layer_types(raw, values)
        values["head_dim"] = values["hidden_size"] // values["num_heads"]
        if "head_dim" in raw:
            values["head_dim"] = integer(raw, "head_dim")
        found = [read_rope(rope, raw) for rope in self.rope_sections(raw)]
        if found[0] != found[-1]:
            raise ValueError(
                "rope_scaling and rope_parameters contradict each other; remove one of them"
            )
        values["rope_theta"], values["rope_scaling"] = found[0]
        return values

    def rope_sections(self, raw: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The RoPE sections of a config.json of transformers 4 or 5, which must agree."""
        found = [raw[name] for name in ("rope_scaling", "rope_parameters") if raw.get(name)] or [{}]
        for rope in found:
            if not isinstance(rope, dict):
                raise ValueError(f"rope_parameters={rope!r} must be an object")
            if nested := [name for name in rope if isinstance(rope[name], dict)]:
                raise ValueError(
                    f"rope_parameters has {nested[0]}, but all layers of {self.model_type} have "
                    "the same RoPE"
                )
        # As in transformers, the original context outside of a section has priority.
        outside = {_ORIGINAL: raw[_ORIGINAL]} if raw.get(_ORIGINAL) is not None else {}
        return [{**rope, **outside} for rope in found]

    def _check_layer_types(self, raw: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """ValueError if layer_types of a family with equal layers say something else."""
        types, window = raw.get("layer_types"), values["sliding_window"]
        if types is None or "full_attention_interval" in self.attention:
            return
        needed = FULL if window is None else SLIDING
        same = window is not None and window >= values["max_position_embeddings"]
        allowed = {FULL, SLIDING} if same else {needed}
        if len(types) != values["num_layers"] or not allowed.issuperset(types):
            raise ValueError(
                f"layer_types={types} is unsupported; all {values['num_layers']} layers must have "
                f"{needed}"
            )

    def write_config(self, spec: ModelSpec) -> dict[str, Any]:
        """Writes config.json for transformers 4 and 5: the inverse of `read_config`."""
        scaling = spec.rope_scaling
        scaled = None if scaling is None else scaling.to_hf(spec.max_position_embeddings)
        original = {}
        if isinstance(scaling, LongRopeScaling):
            # transformers 4 reads it outside of the section only.
            original = {_ORIGINAL: scaling.original_max_position_embeddings}
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "head_dim": spec.head_dim,
            "use_cache": True,
            **self.fixed,
            **{theirs: getattr(spec, ours) for ours, theirs in SIZES.items()},
            **{name: getattr(spec, name) for name in self.defaults},
            **({"sliding_window": spec.sliding_window} if self.attention else {}),
            **original,
            "rope_scaling": scaled,
            "rope_parameters": {
                "rope_type": "default",
                **(scaled or {}),
                "rope_theta": spec.rope_theta,
            },
        }


def family_of(name: str) -> Family:
    """The family of a model_type, or of `package.module:Name`; an unknown one is a UserError."""
    return FAMILIES.get(name)()


def read_rope(rope: Mapping[str, Any], raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """The base and the scaling of a RoPE section; ValueError if it is unsupported."""
    theta = rope.get("rope_theta")
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor={partial} is unsupported; it must be 1.0")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default" and kind not in ROPE_KINDS:
        known = ", ".join(["default", *ROPE_KINDS])
        raise ValueError(f'rope type "{kind}" is unsupported; it must be one of {known}')
    scaling = None
    if kind != "default":
        scaling = ROPE_KINDS[kind].from_hf(rope, raw["max_position_embeddings"])
    return float(raw["rope_theta"] if theta is None else theta), scaling


def full_interval(raw: Mapping[str, Any], layers: int, default: int) -> int | None:
    """The n for which every n-th layer is full and the others have a window; None if none is full.

    `default` is for a config.json without layer_types; ValueError if these are different.
    """
    types, interval = raw.get("layer_types"), default
    if types is not None:
        interval = types.index(FULL) + 1 if FULL in types else layers + 1
        kinds = [SLIDING if n % interval else FULL for n in range(1, len(types) + 1)]
        if len(types) != layers or types != kinds:
            raise ValueError(
                f"layer_types={types} is unsupported; it must have {SLIDING} in all layers "
                f"but every n-th, which has {FULL}"
            )
    return interval if interval <= layers else None


def layer_types(spec: ModelSpec) -> list[str]:
    """The entry of config.json with the kinds of layers."""
    return [FULL if window is None else SLIDING for window in spec.windows]


def integer(raw: Mapping[str, Any], name: str) -> int:
    """An integer of config.json; ValueError if it is missing or something else."""
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        found = f"{name} is missing" if value is None else f"{name}={value!r}"
        raise ValueError(f"{found}; it must be an integer")
    return value
