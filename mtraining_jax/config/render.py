"""Serializes a configuration to TOML or a dict, and renders the help text."""

import textwrap
from collections.abc import Mapping
from typing import Any

from mtraining_jax.config.schema import Config
from mtraining_jax.config.tables import all_fields, nearest, table_of, table_type
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import Field, fields_of, toml_value


def config_to_dict(config: Config) -> dict[str, Any]:
    """Nested dicts of JSON values; `config_from_dict` is the inverse.

    As in files, the options of a plug-in are fields of its section.
    """
    sections = fields_of(Config).items()
    return {name: values_of(field.annotation, getattr(config, name)) for name, field in sections}


def values_of(kind: Any, section: Any) -> dict[str, Any]:
    """The values of a table of type `kind`, see `table_type`, as TOML has them."""
    table, values = table_of(kind, section), {}
    for name, field in table.fields.items():
        holder = section if hasattr(section, name) else getattr(section, table.holder)
        value = getattr(holder, name)
        inner = table_type(field)
        if inner is not None and value is not None:
            value = values_of(inner, value)
        values[name] = list(value) if isinstance(value, tuple) else value
    return values


def config_to_toml(config: Config) -> str:
    """TOML text that loads to an equal configuration.

    TOML has no null: fields that are None become comments. None is always their default.
    """
    lines: list[str] = []

    def table(title: str, values: Mapping[str, Any]) -> None:
        lines.extend(["", f"[{title}]"] if lines else [f"[{title}]"])
        for name, value in values.items():
            if not isinstance(value, dict):
                lines.append(f"{'# ' if value is None else ''}{name} = {toml_value(value)}")
        for name, value in values.items():
            if isinstance(value, dict):
                table(f"{title}.{name}", value)

    for name, section in config_to_dict(config).items():
        table(name, section)
    return "\n".join(lines) + "\n"


def help_text(
    fields: Mapping[str, Field] | None = None, section: str | None = None, width: int = 100
) -> str:
    """Help text with the allowed values, default and description of every field.

    Args:
        fields: by dotted name; without, those of the default plug-ins.
        section: name of a section, table or field to print only that one.

    Raises:
        UserError: unknown section.
    """
    fields = all_fields() if fields is None else fields
    sections, wanted = fields_of(Config), section or ""
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
            lines += textwrap.wrap(
                field.doc, width, initial_indent=" " * 6, subsequent_indent=" " * 6
            )
    return "\n".join(lines[1:]) + "\n"
