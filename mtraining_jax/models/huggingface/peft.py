"""The format of PEFT's LoRA adapters: adapter_config.json and names of tensors. No JAX.

A fused projection (Phi-3) is one module in PEFT, and several projections here. Their adapters are
written as one with the sum of their ranks: A is stacked, and B is block-diagonal.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtraining_jax.models.families.family import Family, family_of
from mtraining_jax.models.huggingface.config import read_json
from mtraining_jax.models.huggingface.names import CheckpointTensor, Part
from mtraining_jax.models.lora.adapters import FACTORS, LoraSpec
from mtraining_jax.models.parameters import LAYERS
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.limits import (
    Decay,
    PositiveFloat,
    PositiveInt,
    Text,
    TextList,
    check_limits,
)

PEFT_CONFIG, PEFT_FILE = "adapter_config.json", "adapter_model.safetensors"
BASE_DIGEST = "base_digest"  # in the metadata of the tensors
# Values of `init_lora_weights`; others, such as "pissa", also change the base.
_INITS = True, False, "gaussian", "eva", "orthogonal"
# Fields that change the computation, with the only supported values.
_FIXED = {
    "peft_type": "LORA", "bias": "none", "fan_in_fan_out": False, "use_rslora": False,
    "use_dora": False, "modules_to_save": None, "layers_to_transform": None, "lora_bias": False,
    "layer_replication": None, "trainable_token_indices": None, "target_parameters": None,
    "use_qalora": False, "use_bdlora": None, "alora_invocation_tokens": None,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Fields:
    """The fields of adapter_config.json that describe adapters."""

    r: PositiveInt = 0  # required
    lora_alpha: PositiveFloat = 0
    target_modules: TextList = ()
    lora_dropout: Decay = 0.0
    base_model_name_or_path: Text | None = None

    def __post_init__(self) -> None:
        check_limits(self)


def peft_config(spec: ModelSpec, base: str | None) -> dict[str, Any]:
    """Returns the contents of adapter_config.json."""
    lora = spec.lora
    assert lora is not None
    modules = {_last(name): len(parts) for name, parts in _adapted(spec).items()}
    fused = {name: parts for name, parts in modules.items() if parts > 1}
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    fixed = {name: value for name, value in _FIXED.items() if value}  # others have their defaults
    return fixed | {
        "base_model_name_or_path": base,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "init_lora_weights": True,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(modules),
        "rank_pattern": {name: parts * lora.rank for name, parts in fused.items()},
        "alpha_pattern": {name: parts * alpha for name, parts in fused.items()},
    }


def read_peft_config(
    directory: str | Path, family: str | None = None
) -> tuple[LoraSpec, str | None]:
    """Reads adapters of a model family, and the folder or name of their base.

    Without `family` the targets are modules of its checkpoints, which may fuse projections.

    Raises:
        UserError: the file is missing or damaged, or a field is not supported.
    """
    path = Path(directory) / PEFT_CONFIG
    raw = read_json(path)
    for name, needed in _FIXED.items():
        if raw.get(name, needed) != needed and raw[name]:
            given, needed = json.dumps(raw[name]), json.dumps(needed)
            raise UserError(f"{path}: {name} = {given} is not supported; it must be {needed}")
    if (init := raw.get("init_lora_weights", True)) not in _INITS:
        raise UserError(
            f"{path}: init_lora_weights = {json.dumps(init)} is not supported, because it may "
            "change the base model; convert the adapters to plain LoRA with PEFT"
        )
    given = {name: raw[name] for name in _Fields.__dataclass_fields__ if name in raw}
    try:
        found = _Fields(**given)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    parts = {} if family is None else fused_parts(family_of(family))
    modules = map(_last, found.target_modules)
    targets = [part for module in modules for part in parts.get(module, (module,))]
    # PEFT may list a module once per layer.
    unique = tuple(sorted(set(targets)))
    lora = LoraSpec(found.r, float(found.lora_alpha), unique, found.lora_dropout)
    return lora, found.base_model_name_or_path


def is_shared(directory: str | Path, spec: ModelSpec) -> bool:
    """Whether the parts of a fused projection share one A, as in adapters that PEFT trained."""
    raw, ours = read_json(Path(directory) / PEFT_CONFIG), peft_config(spec, None)
    for name in ("rank_pattern", "alpha_pattern"):
        if raw.get(name) and raw[name] != ours[name]:
            raise UserError(
                f"{Path(directory) / PEFT_CONFIG}: {name} = {json.dumps(raw[name])} is not "
                "supported; all adapters must have the same rank and alpha"
            )
    return not raw.get("rank_pattern")


def adapter_tensors(spec: ModelSpec, shared: bool = False) -> list[CheckpointTensor]:
    """All tensors of the adapters; see `is_shared`."""
    lora, found = spec.lora, []
    assert lora is not None
    for layer in range(spec.num_layers):
        for module, parts in _adapted(spec).items():
            rank = lora.rank * (1 if shared else len(parts))
            a, b, rows = [], [], 0
            for number, part in enumerate(parts):
                column = 0 if shared else number * lora.rank
                name = f"{LAYERS}{part}"
                a.append(Part(f"{name}.{FACTORS[0]}.weight", layer, column))
                b.append(Part(f"{name}.{FACTORS[1]}.weight", layer, rows, column))
                rows += spec.layer[f"{part}.weight"].shape[0]
            columns = spec.layer[f"{parts[0]}.weight"].shape[1]
            prefix = f"base_model.model.model.{LAYERS}{layer}.{module}"
            shapes = (rank, columns), (rows, rank)
            for factor, shape, of in zip(FACTORS, shapes, (a, b), strict=True):
                found.append(CheckpointTensor(f"{prefix}.{factor}.weight", shape, of))
    return found


def fused_parts(family: Family) -> Mapping[str, tuple[str, ...]]:
    """The projections in each fused module of a checkpoint, by the last parts of their names."""
    return {
        _last(_module(name)): tuple(_last(_module(part)) for part in parts)
        for name, parts in family.fused.items()
    }


def _adapted(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """The modules of a checkpoint layer with adapters, and the projections in each of them."""
    tensors = family_of(spec.family).layer_tensors(spec)
    modules = {_module(name): tuple(map(_module, parts)) for name, parts in tensors.items()}
    return {
        name: parts
        for name, parts in modules.items()
        if all(f"{part}.{FACTORS[0]}.weight" in spec.layer for part in parts)
    }


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _last(name: str) -> str:
    return name.rpartition(".")[2]
