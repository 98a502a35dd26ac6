"""The interface of a model family, with what most decoders share as its defaults."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from mtraining_jax.models.parameters import LAYERS, Parameter, Table, matrix, one_layer, vector
from mtraining_jax.models.rope import ROPE_KINDS, RopeScaling

if TYPE_CHECKING:
    from mtraining_jax.models.spec import ModelSpec

# Our names of the sizes, and those of config.json.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
}


class Family:
    """A decoder of pre-normed layers: attention with rotary positions, then a SwiGLU MLP.

    A subclass says what differs. The decoder (`models.transformer`) has what the table of
    parameters lists: a bias where there is `q_proj.bias`, a norm of queries where there is
    `q_norm.weight`.

    Attributes:
        model_type: as in config.json.
        architecture: of a causal language model, as in config.json.
        title: the name that people know.
        defaults: what transformers assumes when config.json does not say.
        fixed: fields of config.json that must have these values, or be absent.
        fused: tensors of a checkpoint's layer that hold several of our parameters, one below the
            other, by their name in the layer.
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
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    # ---- parameters

    def layer(self, spec: "ModelSpec") -> dict[str, Parameter]:
        """The parameters of one layer by their names in it; a matrix is [out, in]."""
        hidden, inner, std = spec.hidden_size, spec.intermediate_size, spec.initializer_range
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        return {
            "input_layernorm.weight": vector(hidden, 1.0),
            "self_attn.q_proj.weight": matrix(queries, hidden, ("heads", "embed"), std),
            "self_attn.k_proj.weight": matrix(keys, hidden, ("kv_heads", "embed"), std),
            "self_attn.v_proj.weight": matrix(keys, hidden, ("kv_heads", "embed"), std),
            "self_attn.o_proj.weight": matrix(hidden, queries, ("embed", "heads"), std),
            "post_attention_layernorm.weight": vector(hidden, 1.0),
            "mlp.gate_proj.weight": matrix(inner, hidden, ("mlp", "embed"), std),
            "mlp.up_proj.weight": matrix(inner, hidden, ("mlp", "embed"), std),
            "mlp.down_proj.weight": matrix(hidden, inner, ("embed", "mlp"), std),
        }

    def parameters(self, spec: "ModelSpec") -> Table:
        """All parameters by dotted name, those of the layers stacked."""
        table = matrix(
            spec.vocab_size, spec.hidden_size, ("vocab", "embed"), spec.initializer_range
        )
        found = {"embed_tokens.weight": table}
        for name, parameter in self.layer(spec).items():
            found[f"{LAYERS}{name}"] = parameter.stacked(spec.num_layers)
        found["norm.weight"] = vector(spec.hidden_size, 1.0)
        if not spec.tie_word_embeddings:
            found["lm_head.weight"] = table
        return found

    def layer_products(self, spec: "ModelSpec") -> dict[str, int]:
        """Multiplications for one token with each matrix of a layer, by its name there."""
        layer = one_layer(self.parameters(spec))
        return {name: x.size for name, x in layer.items() if len(x.shape) == 2}

    def head_products(self, spec: "ModelSpec") -> int:
        """Multiplications for one token with the output matrix, tied or not."""
        return spec.vocab_size * spec.hidden_size

    # ---- Hugging Face

    def layer_tensors(self, spec: "ModelSpec") -> dict[str, tuple[str, ...]]:
        """The tensors of one layer of a checkpoint, and the parameters that each holds."""
        names = {name: (name,) for name in self.layer(spec)}
        for tensor, parts in self.fused.items():
            for part in parts:
                del names[part]
            names[tensor] = parts
        return names

    def read_config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `ModelSpec` that a config.json decides.

        Args:
            raw: its contents.

        Raises:
            ValueError: if a size is missing or something is asked for that is not supported.
        """
        for name, needed in self.fixed.items():
            if raw.get(name, needed) != needed:
                raise ValueError(
                    f"{name}={_json(raw[name])} is unsupported; allowed is {_json(needed)}"
                )
        values: dict[str, Any] = {"family": self.model_type}
        for ours, theirs in SIZES.items():
            values[ours] = _whole_number(raw, theirs)
        for name, default in self.defaults.items():
            value = raw.get(name)
            values[name] = default if value is None else value
        values["head_dim"] = self.head_dim(raw, values)
        rope = self.rope_parameters(raw)
        if rope.get("rope_theta") is not None:
            values["rope_theta"] = rope["rope_theta"]
        values["rope_theta"] = float(values["rope_theta"])
        partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
        if partial not in (None, 1.0):
            raise ValueError(f"partial_rotary_factor={partial} is unsupported; allowed is 1.0")
        values["rope_scaling"] = _scaling(rope, values["max_position_embeddings"])
        return values

    def head_dim(self, raw: Mapping[str, Any], values: Mapping[str, Any]) -> int:
        """The width of a head, which config.json may leave out."""
        if raw.get("head_dim") is not None:
            return _whole_number(raw, "head_dim")
        return values["hidden_size"] // values["num_heads"]

    def rope_parameters(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The rope section of a config.json of transformers 5, or of 4."""
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise ValueError(f"rope_parameters={rope!r} must be an object")
        return rope

    def write_config(self, spec: "ModelSpec") -> dict[str, Any]:
        """The contents of config.json, readable by transformers 4 and 5: `read_config` inverted."""
        scaling = spec.rope_scaling
        scaled = None if scaling is None else scaling.to_hf(spec.max_position_embeddings)
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "head_dim": spec.head_dim,
            "use_cache": True,
            **self.fixed,
            **{theirs: getattr(spec, ours) for ours, theirs in SIZES.items()},
            **{name: getattr(spec, name) for name in self.defaults},
            "rope_scaling": scaled,
            "rope_parameters": {
                "rope_type": "default", **(scaled or {}), "rope_theta": spec.rope_theta
            },
        }  # fmt: skip


def with_defaults(raw: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """`raw` with values for fields that it lacks or has as null."""
    return defaults | {name: value for name, value in raw.items() if value is not None}


def _scaling(rope: Mapping[str, Any], context: int) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ROPE_KINDS:
        known = ", ".join(["default", *ROPE_KINDS])
        raise ValueError(f'rope type "{kind}" is unsupported; allowed are {known}')
    return ROPE_KINDS[kind].from_hf(rope, context)


def _whole_number(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        found = f"{name} is missing" if value is None else f"{name}={value!r}"
        raise ValueError(f"{found}; an integer is needed")
    return value


def _json(value: Any) -> str:
    return json.dumps(value)
