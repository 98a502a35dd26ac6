"""All fields of a configuration by dotted name: the nearest one, and the help text."""

import dataclasses
import difflib
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from mtraining_jax.config.schema import Sections
from mtraining_jax.config.tables import table_of, table_type
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import Field, fields_of, toml_value

# Fields by their names in other trainers, for hints.
_ELSEWHERE = {
    "bf16": "model.dtype",
    "context_length": "data.seq_len",
    "eval_steps": "eval.interval",
    "fp16": "model.dtype",
    "gradient_accumulation_steps": "optimizer.accumulation_steps",
    "gradient_checkpointing": "model.remat",
    "learning_rate": "optimizer.lr",
    "logging_steps": "run.log_interval",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "max_grad_norm": "optimizer.clip_norm",
    "max_length": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "max_steps": "run.steps",
    "model_name_or_path": "model.init_from",
    "num_train_epochs": "run.epochs",
    "optimizer.name": "optimizer.kind",
    "per_device_train_batch_size": "data.batch_size",
    "precision": "model.dtype",
    "resume_from_checkpoint": "checkpoint.resume",
    "save_every": "checkpoint.interval",
    "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep",
    "target_modules": "lora.targets",
    "warmup_ratio": "optimizer.warmup_steps",
}


def all_fields(values: Mapping[str, Any] | None = None) -> dict[str, Field]:
    """All fields of a configuration by dotted name; a table comes before its fields.

    `values`, by section, select the kinds of plug-ins; without, they are the default ones.
    """
    found: dict[str, Field] = {}

    def collect(prefix: str, kind: Any, values: Any) -> list[str]:
        fields = table_of(kind, values).fields
        for name, field in fields.items():
            dotted = f"{prefix}.{name}"
            found[dotted] = field
            if (inner := table_type(field)) is not None:
                within = values.get(name) if isinstance(values, Mapping) else None
                names = ", ".join(collect(dotted, inner, within))
                found[dotted] = dataclasses.replace(field, words=f"a table of {names} or none")
        return list(fields)

    for name, field in fields_of(Sections).items():
        collect(name, field.annotation, (values or {}).get(name))
    return found


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The closest match for a misspelled dotted `name`, or None.

    Preference: name in another trainer, similar name in the same section, same name in
    another section, any similar name.
    """
    names = list(names)
    head, _, leaf = name.rpartition(".")
    if (known := _ELSEWHERE.get(name) or _ELSEWHERE.get(leaf.replace("-", "_"))) in names:
        return known
    siblings = [n for n in names if n.rpartition(".")[0] == head]
    if head and (close := difflib.get_close_matches(name, siblings, 1, cutoff=0.75)):
        return close[0]
    if same := [n for n in names if n.rpartition(".")[2] == leaf]:
        return same[0]
    close = difflib.get_close_matches(name, names, 1, cutoff=0.6)
    return close[0] if close else None


def help_text(fields: Mapping[str, Field] | None = None, section: str | None = None) -> str:
    """Help text with the allowed values, default and description of every field.

    Args:
        fields: by dotted name; without, those of the default plug-ins.
        section: name of a section, table or field to print only that one.

    Raises:
        UserError: unknown section.
    """
    fields = all_fields() if fields is None else fields
    sections, wanted = fields_of(Sections), section or ""
    if wanted and wanted not in {*sections, *fields}:
        near = nearest(wanted, [*sections, *fields])
        hint = f"did you mean {near}? Choose" if near else "choose"
        ways = f"{hint} one of {', '.join(sections)}"
        raise UserError(f"--help {wanted}: {wanted} is not a section or field; {ways}")
    lines: list[str] = []
    for name in [wanted.partition(".")[0]] if wanted else sections:
        doc = (sections[name].annotation.__doc__ or "").strip().splitlines()[0]
        lines += ["", f"[{name}] {doc}"]
        for dotted, field in fields.items():
            if not f"{dotted}.".startswith(f"{wanted or name}."):
                continue
            if dotted.startswith("eval.data.") and not wanted.startswith("eval.data"):  # as [data]
                continue
            default = "required" if field.required else f"default {toml_value(field.default)}"
            lines += [f"  --{dotted}  {field.allowed}; {default}"]
            lines += textwrap.indent(textwrap.fill(field.doc, 94), " " * 6).splitlines()
    return "\n".join(lines[1:]) + "\n"
