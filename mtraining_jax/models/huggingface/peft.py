"""The format of PEFT's LoRA adapters: adapter_config.json and names of tensors. No JAX.

A fused projection (Phi-3) is one module in PEFT, and several projections here. Their adapters are
written as one with the sum of their ranks: A is stacked, and B is block-diagonal.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtraining_jax.models.families.family import Family, family_of
from mtraining_jax.models.huggingface.config import PEFT_CONFIG, read_json
from mtraining_jax.models.huggingface.names import CheckpointTensor, Part
from mtraining_jax.models.huggingface.tensors import PEFT_FILE, Tensors
from mtraining_jax.models.lora.adapters import FACTORS, LoraSpec
from mtraining_jax.models.parameters import LAYERS
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import fields_of, options
from mtraining_jax.utils.hub import HUB
from mtraining_jax.utils.limits import Decay, PositiveFloat, PositiveInt, Text, TextList

# The adapted model, as config.json. With that name, transformers would expect the weights of the
# base in the folder.
MODEL_CONFIG = "model_config.json"
BASE_DIGEST = "base_digest"  # in the metadata of the tensors
# Values of `init_lora_weights`; others, such as "pissa", also change the base.
_INITS = True, False, "gaussian", "eva", "orthogonal"
# Fields that adapters of this kind need.
_FIXED = {"peft_type": "LORA", "bias": "none"}
# Fields that change nothing, or that are read here. All others must be off.
_READ = {
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "use_rslora",
    "base_model_name_or_path", "init_lora_weights", "rank_pattern", "alpha_pattern",
    "auto_mapping", "revision", "task_type", "inference_mode", "peft_version", "layers_pattern",
    "megatron_core", "runtime_config", "qalora_group_size", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config",
}  # fmt: skip
MERGE = (
    "merge the adapters with PEFT, AutoPeftModelForCausalLM.from_pretrained(FOLDER)"
    ".merge_and_unload().save_pretrained(NEW_FOLDER), and set model.init_from to the new folder"
)


@options
class _Fields:
    """The fields of adapter_config.json that describe adapters."""

    r: PositiveInt
    lora_alpha: PositiveFloat = 8  # as in PEFT
    target_modules: TextList = ()
    lora_dropout: Decay = 0.0
    base_model_name_or_path: Text | None = None
    revision: Text | None = None


def peft_config(spec: ModelSpec, base: str | None, revision: str | None = None) -> dict[str, Any]:
    """Returns the contents of adapter_config.json; see `save_peft`."""
    lora = spec.lora
    assert lora is not None
    modules = {_last(name): len(parts) for name, parts in _adapted(spec).items()}
    fused = {name: parts for name, parts in modules.items() if parts > 1}
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return _FIXED | {
        "base_model_name_or_path": base,
        "revision": revision,
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

    The base is `hf://OWNER/NAME@REVISION` if the file has a revision and no such folder exists.
    Without `family` the targets are modules of its checkpoints, which may fuse projections.

    Raises:
        UserError: the file is missing or damaged, or a field is not supported.
    """
    path = Path(directory) / PEFT_CONFIG
    raw = read_json(path)
    for name, value in raw.items():
        needed = _FIXED.get(name)
        if value and name not in _READ and value != needed:
            given, needed = json.dumps(value), json.dumps(needed)
            raise UserError(f"{path}: {name} = {given} must be {needed}; {MERGE}")
    if (init := raw.get("init_lora_weights", True)) not in _INITS:
        raise UserError(
            f"{path}: init_lora_weights = {json.dumps(init)} may change the base model; {MERGE}"
        )
    if raw.get("exclude_modules") or isinstance(raw.get("target_modules"), str):
        # The tensors are those of the modules that match the patterns.
        names = Tensors(directory, PEFT_FILE).files
        marks = tuple(f".{factor}.weight" for factor in FACTORS)
        found = {x.rpartition(".lora_")[0] for x in names if x.endswith(marks)}
        raw = {**raw, "target_modules": sorted({_last(x) for x in found})}
    given = {name: raw[name] for name in fields_of(_Fields) if name in raw}
    try:
        found = _Fields(**given)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    parts = {} if family is None else fused_parts(family_of(family))
    modules = map(_last, found.target_modules)
    targets = [part for module in modules for part in parts.get(module, (module,))]
    # PEFT may list a module once per layer.
    unique = tuple(sorted(set(targets)))
    # rsLoRA divides by the root of the rank.
    alpha = found.lora_alpha * (math.sqrt(found.r) if raw.get("use_rslora") else 1)
    lora = LoraSpec(found.r, float(alpha), unique, found.lora_dropout)
    base, revision = found.base_model_name_or_path, found.revision
    if base and revision and not (Path(base).is_absolute() or Path(base).is_dir()):
        base = f"{HUB}{base}@{revision}"
    return lora, base


def is_shared(directory: str | Path, spec: ModelSpec) -> bool:
    """Whether the parts of a fused projection share one A, as in adapters that PEFT trained."""
    raw, ours = read_json(Path(directory) / PEFT_CONFIG), peft_config(spec, None)
    names = "rank_pattern", "alpha_pattern"
    given, written = ({name: x.get(name) or {} for name in names} for x in (raw, ours))
    same = given == written and not raw.get("use_rslora")
    if not same and any(given.values()):
        raise UserError(
            f"{Path(directory) / PEFT_CONFIG}: rank_pattern = {json.dumps(given[names[0]])} and "
            f"alpha_pattern = {json.dumps(given[names[1]])} are not supported, because all "
            f"adapters must have the same rank and alpha; {MERGE}"
        )
    return not given[names[0]]


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
