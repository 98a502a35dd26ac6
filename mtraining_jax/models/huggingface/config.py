"""config.json of a Hugging Face checkpoint. Does not import JAX."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtraining_jax.models.families import FAMILIES
from mtraining_jax.models.families.family import EXPERTS, SIZES, family_of
from mtraining_jax.models.spec import ATTENTION, ModelSpec
from mtraining_jax.patterns.base import Pattern
from mtraining_jax.utils import file_limits
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import shortened

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
PEFT_CONFIG = "adapter_config.json"
SPARSE_ENTRY = "sparse_attention"  # its entry for `sparse_attention.py`

# Fields of `ModelSpec` that config.json fixes because they determine the model, and fields in
# which a model may intentionally differ from its checkpoint.
FIXED = (*("family", *SIZES, "head_dim", "tie_word_embeddings"), *list(EXPERTS)[:3], *ATTENTION)
FREE = (
    "rope_theta",
    "rope_scaling",
    "max_position_embeddings",
    "rms_norm_eps",
    "initializer_range",
    "router_aux_loss_coef",
)


def read_hf_config(directory: str | Path, **overrides: Any) -> ModelSpec:
    """Reads the model of a checkpoint, in the format of transformers 4 or 5.

    `overrides` are fields of `ModelSpec` that config.json lacks, for example `dtype`. Raises
    UserError if the file is missing or damaged, or has an unsupported value.
    """
    fields = ModelSpec.__dataclass_fields__
    if unknown := sorted(overrides.keys() - fields.keys()):
        raise UserError(f"{unknown[0]} is not a field of a model; choose from {', '.join(fields)}")
    values = read_hf_values(directory, overrides.get("family"))
    try:
        return ModelSpec.from_config(values | overrides)
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        text = shortened(str(error), 500)
        raise UserError(f"{Path(directory) / CONFIG_FILE}: {text}") from None


def read_hf_values(directory: str | Path, own_family: str | None = None) -> dict[str, Any]:
    """Reads `FIXED` and `FREE` of a folder, or of a file with another name than config.json.

    `own_family` may be a user's family for the model_type.
    """
    path = Path(directory)
    path = path if path.is_file() else path / CONFIG_FILE
    raw = read_json(path)
    kind, architectures = raw.get("model_type"), raw.get("architectures") or [None]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str | None):
        raise UserError(f"{path}: architectures={architectures!r} must be a list of names")
    architecture = architectures[0]
    text = raw.get("text_config")
    if isinstance(text, dict) and text.get("model_type") in FAMILIES.names:
        raise UserError(
            f"{path} describes {architecture}; only its text model is supported: write it into a "
            'folder with transformers, as docs/training.md shows in "Text models"'
        )
    if path.name == CONFIG_FILE and path.with_name(PEFT_CONFIG).exists():
        raise UserError(
            f"{path.parent} has adapters of PEFT next to {CONFIG_FILE}; move {PEFT_CONFIG} and its "
            "tensors into a folder of their own, for lora.init_from"
        )
    if kind is None and architecture is not None:
        kind = next((k for k in FAMILIES.names if family_of(k).architecture == architecture), None)
    own = family_of(own_family) if own_family is not None and ":" in own_family else None
    if own is not None and own.model_type == kind:
        family = own
    elif isinstance(kind, str) and kind in FAMILIES.names:
        family = family_of(kind)
    else:
        known = ", ".join(sorted(FAMILIES.names))
        raise UserError(
            f"{path} describes an unsupported model, {architecture or 'without architecture'} "
            f"(model_type {kind}); supported model types are {known}"
        )
    if architecture not in (None, family.architecture):
        raise UserError(
            f"{path} describes {architecture}, but of model_type {kind} only {family.architecture}"
            " is supported"
        )
    if (quantized := raw.get("quantization_config")) is not None:
        how = "use unquantized weights"
        if isinstance(quantized, dict) and quantized.get("quant_method") == "mxfp4":
            how = (
                "its weights are MXFP4; write bf16 weights with transformers: AutoModelForCausalLM"
                '.from_pretrained(FOLDER, dtype="bfloat16", quantization_config='
                "Mxfp4Config(dequantize=True)).save_pretrained(NEW_FOLDER)"
            )
        raise UserError(f"{path}: quantization_config is not supported; {how}")
    try:
        values = family.read_config(raw)
        return values | {"family": own_family} if family is own else values
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        # A value of the wrong type may fail in arithmetic in many ways.
        raise UserError(f"{path}: {shortened(str(error), 500)}") from None


def hf_config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """Returns the contents of config.json, for transformers 4 and 5."""
    theirs = family_of(spec.family).write_config(spec)
    return dict(sorted((theirs | {"torch_dtype": dtype, "dtype": dtype}).items()))


def sparse_entry(kind: str, pattern: Pattern, family: str) -> dict[str, Any] | None:
    """Returns the entry of config.json for a pattern; None if `sparse_attention.py` lacks it."""
    options = vars(pattern.for_prompts())
    unsupported = options.get("columns") or FAMILIES.get(family).has_sinks
    if unsupported or kind not in ("sampled_rows", "xattention", "vertical_slash"):
        return None
    return {"kind": kind, **options}


def check_same_model(config: Any, directory: str | Path, override: Sequence[str] = ()) -> ModelSpec:
    """Checks that a checkpoint matches the model, except for the fields in `override`.

    Returns:
        The model that config.json describes.
    """
    ours = ModelSpec.from_config(config)
    theirs = ModelSpec.from_config(read_hf_values(directory, ours.family))

    def value(spec: ModelSpec, name: str) -> Any:
        if name == "rope_scaling" and spec.rope_scaling is not None:
            return spec.rope_scaling.to_hf(spec.max_position_embeddings)
        return getattr(spec, name)

    for name in (*FIXED, *FREE):
        if name not in override and value(ours, name) != value(theirs, name):
            raise UserError(
                f"{Path(directory) / CONFIG_FILE} is of another model: it has "
                f"{SIZES.get(name, name)} = {value(theirs, name)}, but the configuration has "
                f"{name} = {value(ours, name)}"
            )
    return theirs


def read_end_tokens(directory: str | Path) -> list[int]:
    """Reads the ids at which generation stops, as transformers does; empty if none are named.

    Raises UserError if eos_token_id is neither an id nor a list of ids.
    """
    for path in (Path(directory) / GENERATION_FILE, Path(directory) / CONFIG_FILE):
        found = read_json(path).get("eos_token_id") if path.is_file() else None
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not ids or not all(type(x) is int and x >= 0 for x in ids):
                raise UserError(
                    f"{path}: eos_token_id = {found!r} must be an id or a non-empty list of ids"
                )
            return ids
    return []


def read_json(path: Path, limit: int = file_limits.LARGEST_CONFIG) -> dict[str, Any]:
    """Reads a file with one JSON object, of at most `limit` bytes, or raises UserError."""
    try:
        raw = file_limits.read_json(path, limit)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} must contain a JSON object, not a {type(raw).__name__}")
    return raw
