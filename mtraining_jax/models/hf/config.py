"""config.json of Hugging Face's Qwen2, in the old and the new spelling of rotary positions."""

import json
import math
from pathlib import Path
from typing import Any

from mtraining_jax.errors import UserError
from mtraining_jax.models.spec import ModelSpec, YarnScaling

_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
}
# What transformers assumes when config.json does not say.
_DEFAULTS = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
_DEFAULT_THETA = 10000.0
_SAME = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "tie_word_embeddings",
)


def read_hf_config(directory: str | Path, **overrides: Any) -> ModelSpec:
    """Reads the model of a checkpoint.

    Both spellings are understood: `rope_theta` with `rope_scaling` (transformers 4) and
    `rope_parameters` (transformers 5).

    Args:
        directory: holds config.json.
        **overrides: fields of `ModelSpec` that config.json does not decide, such as `dtype` and
            `remat`.

    Raises:
        UserError: if the file is missing or damaged, or asks for what is not built here.
    """
    path = Path(directory) / "config.json"
    raw = read_json(path)
    _check_supported(raw, path)
    values: dict[str, Any] = dict(_DEFAULTS)
    for ours, theirs in _NAMES.items():
        values[ours] = _number(raw, theirs, path)
    for name, default in _DEFAULTS.items():
        value = raw.get(name)
        values[name] = default if value is None else value
    if raw.get("head_dim") is not None:
        values["head_dim"] = _number(raw, "head_dim", path)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"{path}: rope_parameters={rope!r} must be an object")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    values["rope_theta"] = float(_DEFAULT_THETA if theta is None else theta)
    values["rope_scaling"] = _yarn(rope, path)
    try:
        return ModelSpec.from_config(values | overrides)
    except (UserError, TypeError) as error:
        raise UserError(f"{path}: {error}") from None


def hf_config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """The contents of config.json, readable by transformers 4 and 5."""
    theirs: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "head_dim": spec.head_dim,
        "torch_dtype": dtype,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "rope_theta": spec.rope_theta,
        "rope_scaling": None,
    }
    theirs |= {name: getattr(spec, ours) for ours, name in _NAMES.items()}
    theirs |= {name: getattr(spec, name) for name in _DEFAULTS}
    scaling = spec.rope_scaling
    if scaling is not None:
        theirs["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": (
                scaling.original_max_position_embeddings or spec.max_position_embeddings
            ),
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
        }
        if scaling.attention_factor is not None:
            theirs["rope_scaling"]["attention_factor"] = scaling.attention_factor
        if not scaling.truncate:
            theirs["rope_scaling"]["truncate"] = False
    theirs["rope_parameters"] = {
        "rope_type": "default",
        **(theirs["rope_scaling"] or {}),
        "rope_theta": spec.rope_theta,
    }
    return dict(sorted(theirs.items()))


def check_same_model(config: Any, directory: str | Path) -> None:
    """Refuses a checkpoint of another model.

    Rotary positions may differ, for that is how a context is extended; so may the context length,
    the compute dtype and the recomputation.

    Args:
        config: a `ModelSpec`, or any object or mapping with its fields.
        directory: holds config.json.

    Raises:
        UserError: naming the first field that differs.
    """
    ours, theirs = ModelSpec.from_config(config), read_hf_config(directory)
    for name in _SAME:
        if getattr(ours, name) != getattr(theirs, name):
            raise UserError(
                f"{Path(directory) / 'config.json'} is of another model: "
                f"{_NAMES.get(name, name)}={getattr(theirs, name)} there, "
                f"model.{name}={getattr(ours, name)} here"
            )


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Raises:
        UserError: if it does not, or cannot be read.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} must hold a JSON object, not a {type(raw).__name__}")
    return raw


def _check_supported(raw: dict[str, Any], path: Path) -> None:
    kinds = raw.get("architectures") or [raw.get("model_type")]
    if raw.get("model_type", "qwen2") != "qwen2" or kinds[0] not in ("Qwen2ForCausalLM", "qwen2"):
        raise UserError(
            f"{path} describes {kinds[0]} (model_type {raw.get('model_type')}); "
            "supported is Qwen2ForCausalLM"
        )
    for name, allowed in (("hidden_act", "silu"), ("attention_dropout", 0.0)):
        if raw.get(name, allowed) != allowed:
            raise UserError(f"{path}: {name}={raw[name]!r} is unsupported; allowed is {allowed!r}")
    if raw.get("use_sliding_window"):
        raise UserError(f"{path}: use_sliding_window=true is unsupported; allowed is false")
    if raw.get("quantization_config"):
        raise UserError(f"{path}: quantization_config is unsupported; start from full weights")


def _number(raw: dict[str, Any], name: str, path: Path) -> int:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        found = f"{name} is missing" if value is None else f"{name}={value!r}"
        raise UserError(f"{path}: {found}; an integer is needed")
    return value


def _yarn(rope: dict[str, Any], path: Path) -> YarnScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "yarn":
        raise UserError(f'{path}: rope type "{kind}" is unsupported; allowed are default and yarn')
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"{path}: partial_rotary_factor is unsupported; allowed is 1.0")
    values = dict(rope)
    both = rope.get("mscale"), rope.get("mscale_all_dim")
    if values.get("attention_factor") is None and all(both) and rope.get("factor"):
        # The ratio of two attention factors, as transformers computes it.
        scale = math.log(max(rope["factor"], 1.0))
        values["attention_factor"] = (0.1 * both[0] * scale + 1.0) / (0.1 * both[1] * scale + 1.0)
    try:
        return YarnScaling.from_config(values)
    except (UserError, TypeError) as error:
        raise UserError(f"{path}: {error}") from None
