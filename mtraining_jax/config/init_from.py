"""Model fields from config.json, and the tokenizer, of the checkpoint in `model.init_from`."""

import functools
import json
import os.path
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mtraining_jax.config.sections import ROPE_KIND, RunConfig
from mtraining_jax.config.tables import values_of
from mtraining_jax.data.files import errors_as
from mtraining_jax.models.huggingface.config import CONFIG_FILE, FIXED, FREE, read_hf_values
from mtraining_jax.models.huggingface.peft import PEFT_CONFIG
from mtraining_jax.models.rope import RopeScaling, make_scaling
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import shortened
from mtraining_jax.utils.file_limits import absence, is_url
from mtraining_jax.utils.hub import HUB, local_folder, with_commit


def with_commits(table: Mapping[str, Any], stored: bool) -> dict[str, Any]:
    """Replaces the revisions of all names with `hf://` by commits.

    A run that resumes keeps its commits, unless the table is `stored` by one already.
    """
    recorded = functools.cache(lambda: {} if stored else _recorded(table))

    def pinned(value: Any, *place: str | int) -> Any:
        if isinstance(value, dict):
            return {key: pinned(x, *place, key) for key, x in value.items()}
        if isinstance(value, list | tuple):
            return [pinned(x, *place, number) for number, x in enumerate(value)]
        if not isinstance(value, str) or not value.startswith(HUB):
            return value
        before: Any = recorded()
        for key in place:
            inner: Any = dict(enumerate(before)) if isinstance(before, list) else before
            before = inner.get(key) if isinstance(inner, dict) else None
        field = ".".join(key for key in place if isinstance(key, str))
        return with_commit(value, str(before), f"{field} = ")

    return pinned(table)


def _recorded(table: Mapping[str, Any]) -> dict[str, Any]:
    """config.toml of a run with a checkpoint to resume from; empty without."""
    from etils import epath  # for a bucket, too

    match {"run": {}, **table}:
        case {"checkpoint": {"resume": False}}:
            return {}
        case {"run": dict(run)}:
            parent, name = (str(run.get(x, getattr(RunConfig, x))) for x in ("output_dir", "name"))
            folder = epath.Path(parent).expanduser() / name
            file = folder / "config.toml"
            with errors_as(UserError, f"{file} cannot be read", Exception):
                steps = (x for x in folder.glob("checkpoints/*") if x.name.isdecimal())
                return tomllib.loads(file.read_text()) if any(steps) and file.exists() else {}
    return {}


def with_checkpoint(table: Mapping[str, Any], say: Callable[[str, str], None]) -> dict[str, Any]:
    """Fills the section `model` from config.json, except for the fields in `model.override`.

    `data.tokenizer` defaults to the checkpoint's tokenizer.json.
    `say` is called with a field's name and a message for each field that differs from config.json.
    """
    given = table.get("model")
    if not isinstance(given, dict) or not isinstance(given.get("init_from"), str):
        return dict(table)
    start, override = os.path.expanduser(given["init_from"]), given.get("override") or ()
    what, resume = f"model.init_from = {start}", ""
    folder = str(local_folder(start))
    if is_url(folder):
        raise UserError(f"{what} {absence(folder)}")
    if os.path.isfile(folder):
        raise UserError(f"{what} is a file; give its folder, {os.path.dirname(folder) or '.'}")
    if not os.path.isdir(folder) and re.fullmatch(r"\w[\w.-]*/[\w.-]+", folder):
        raise UserError(f"{what} is not a folder; if it is on Hugging Face, give {HUB}{folder}")
    if os.path.isdir(os.path.join(folder, "checkpoints")):
        way = f"give {os.path.join(folder, 'hf')}, its export with --checkpoint.export_hf=true"
        raise UserError(f"{what} is the folder of a run; {way}")
    if not os.path.exists(os.path.join(folder, CONFIG_FILE)):
        resume = "; a run that resumes from its own checkpoint does not need it: set"
        resume += " model.init_from = none and all sizes of the model"
        lora = table.get("lora")
        if isinstance(lora, dict) and lora.get("rank"):
            resume = "; adapters always need it"
        if os.path.exists(os.path.join(folder, PEFT_CONFIG)):
            way = f"set lora.init_from = {folder}, and model.init_from to their base"
            raise UserError(f"{what} has adapters of PEFT; {way}")
    try:
        family = given.get("family")
        found = read_hf_values(folder, family if isinstance(family, str) else None)
    except UserError as error:
        raise UserError(f"{what}: {error}{resume}") from None
    model = dict(given)
    for name in (*FIXED, *FREE):
        if name in override and name in FREE:
            continue
        if name not in model:
            model[name] = as_toml(found[name])
        elif not _equal(name, model[name], found):
            way = f', or keep it with model.override = ["{name}"]' if name in FREE else ""
            say(
                f"model.{name}",
                f"model.{name} = {_text(model[name])} differs from {Path(folder) / CONFIG_FILE},"
                f" which has {_text(as_toml(found[name]))}: remove it{way}",
            )
            model[name] = as_toml(found[name])
    data, tokenizer = table.get("data", {}), "tokenizer.json"
    if isinstance(data, dict) and os.path.isfile(os.path.join(folder, tokenizer)):
        data = {"tokenizer": os.path.join(start, tokenizer), **data}
    return {**table, "model": model, "data": data}


def _equal(name: str, given: Any, found: Mapping[str, Any]) -> bool:
    if name != "rope_scaling":
        return given == found[name]
    try:
        scaling = make_scaling(given)
    except (ValueError, TypeError):
        return True  # reported by validation
    context = found["max_position_embeddings"]
    both = (x if x is None else x.to_hf(context) for x in (scaling, found[name]))
    return next(both) == next(both)


def as_toml(value: Any) -> Any:
    """A value as TOML would load it."""
    if not isinstance(value, RopeScaling):
        return value
    return {key: x for key, x in values_of(ROPE_KIND, value).items() if x is not None}


def _text(value: Any) -> str:
    return "none" if value is None else shortened(json.dumps(value, default=str), 200)
