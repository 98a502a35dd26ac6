"""The tables of a configuration file, whose fields may depend on the kind of a plug-in."""

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from mtraining_jax.config.kinds import OptionsOf
from mtraining_jax.config.schema import Config
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import Field, fields_of

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
    "per_device_train_batch_size": "data.batch_size",
    "precision": "model.dtype",
    "resume_from_checkpoint": "checkpoint.resume",
    "save_every": "checkpoint.interval",
    "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep",
    "target_modules": "lora.targets",
    "warmup_ratio": "optimizer.warmup_steps",
}


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a file: a section, with the options of a plug-in if one belongs to it."""

    section: Any  # class of the section; None if there are only options
    plugin: OptionsOf | None = None  # selects the class of the options
    holder: str = ""  # field of the section that holds the options
    kind: Any = None  # the selected kind of plug-in
    options: Any = None  # class of its options; None if the kind is unknown

    @property
    def fields(self) -> dict[str, Field]:
        """The selector, the fields of the section and the options of the selected kind."""
        own = {} if self.plugin is None else {self.plugin.selector: self.plugin.field}
        own |= {} if self.section is None else fields_of(self.section)
        own.pop(self.holder, None)
        options = {} if self.options is None else fields_of(self.options)
        return own | options | own  # a field of the section hides an option of the same name

    def kinds_with(self, name: str) -> dict[str, Field]:
        """The built-in kinds that have an option of this name, and the option."""
        if self.plugin is None:
            return {}
        options = {kind: fields_of(self.plugin.classes.get(kind)) for kind in self.plugin.classes}
        return {kind: fields[name] for kind, fields in options.items() if name in fields}

    def build(self, values: Mapping[str, Any]) -> Any:
        """The section or options; values that contradict each other are a ValueError."""
        if self.plugin is None:
            return self.section(**values)
        names = fields_of(self.options).keys() & values.keys()
        options = self.options(**{name: values[name] for name in names})
        if self.section is None:
            return options
        names = fields_of(self.section).keys() & values.keys()
        return self.section(**{name: values[name] for name in names}, **{self.holder: options})


def table_type(field: Field) -> Any:
    """What a field holds if it is a table: the class of a section, or `OptionsOf`; else None."""
    for option, marks in field.options:
        for mark in marks:
            if isinstance(mark, OptionsOf):
                return mark
        if dataclasses.is_dataclass(option):
            return option
    return None


def table_of(kind: Any, values: Any) -> Table:
    """The table of a `table_type`, with the options that `values`, or an object, select."""
    section, holder, plugin = kind, "", None
    if isinstance(kind, OptionsOf):
        section, plugin = None, kind
    else:
        for name, field in fields_of(kind).items():
            mark = table_type(field)
            if isinstance(mark, OptionsOf) and type(None) not in field.kinds:
                holder, plugin = name, mark
    if plugin is None:
        return Table(section)
    get = values.get if isinstance(values, Mapping) else functools.partial(getattr, values)
    selected = get(plugin.selector, None)
    selected = plugin.default if selected is None else selected
    try:
        options = plugin.classes.get(selected) if isinstance(selected, str) else None
    except UserError:
        options = None
    return Table(section, plugin, holder, selected, options)


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

    for name, field in fields_of(Config).items():
        collect(name, field.annotation, (values or {}).get(name))
    return found


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The closest match for a misspelled dotted `name`, or None.

    Preference: name in another trainer, similar name in the same section, same name in
    another section, any similar name.
    """
    names = list(names)
    head, _, leaf = name.rpartition(".")
    if (known := _ELSEWHERE.get(leaf.replace("-", "_"))) in names:
        return known
    siblings = [n for n in names if n.rpartition(".")[0] == head]
    if head and (close := difflib.get_close_matches(name, siblings, 1, cutoff=0.75)):
        return close[0]
    if same := [n for n in names if n.rpartition(".")[2] == leaf]:
        return same[0]
    close = difflib.get_close_matches(name, names, 1, cutoff=0.6)
    return close[0] if close else None
