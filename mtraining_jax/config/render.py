"""Serializes a configuration to TOML or a dict, and renders the help text."""

import dataclasses
import textwrap
from typing import Any

from mtraining_jax.config.fields import all_fields, infos, section_class, sections, toml_value
from mtraining_jax.config.schema import Config


def config_to_dict(config: Config) -> dict[str, Any]:
    """Nested dicts of JSON values; `config_from_dict` is the inverse.

    Omits the fields of custom plug-ins that are not selected: the reader may not know them.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, tuple) else value

    table = plain(dataclasses.asdict(config))
    _leave_out_own(config, table)
    return table


def _leave_out_own(section: Any, values: dict[str, Any]) -> None:
    """Removes the fields of custom plug-ins that are not selected."""
    owned = section.owners if hasattr(section, "plugins") else {}
    for field, owners in owned.items():
        chosen = values[section.plugins.selector]
        if chosen not in owners and not section.plugins.registry.names_any(owners):
            del values[field]
    for name, inner in values.items():
        if isinstance(inner, dict):
            _leave_out_own(getattr(section, name), inner)


def config_to_toml(config: Config) -> str:
    """TOML text that loads to an equal configuration.

    TOML has no null: fields that are None become comments. None is always their default.
    """
    lines: list[str] = []

    def table(title: str, values: dict[str, Any]) -> None:
        lines.extend(["", f"[{title}]"] if lines else [f"[{title}]"])
        inner = {name: value for name, value in values.items() if isinstance(value, dict)}
        for name, value in values.items():
            if name not in inner:
                mark = "# " if value is None else ""
                lines.append(f"{mark}{name} = {toml_value(value)}")
        for name, value in inner.items():
            table(f"{title}.{name}", value)

    for name, section in config_to_dict(config).items():
        table(name, section)
    return "\n".join(lines) + "\n"


def help_text(width: int = 100) -> str:
    """Help text with the allowed values, default and description of every field."""
    lines: list[str] = []
    fields = list(all_fields().values())
    own = sections()
    nested = [  # sections that also appear within another section, documented once
        f"{name}.{field}."
        for name, section in own.items()
        for field, info in infos(section).items()
        if section_class(info.annotation) in own.values()
    ]
    for name, section in own.items():
        doc = (section.__doc__ or "").strip().splitlines()[0]
        lines += ["", f"[{name}] {doc}"]
        for field in fields:
            if field.name.split(".")[0] != name or field.name.startswith(tuple(nested)):
                continue
            default = "required" if field.required else f"default {toml_value(field.default)}"
            lines += [f"  --{field.name}  {field.allowed}; {default}"]
            doc = " ".join(field.doc.split())
            lines += textwrap.wrap(doc, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines[1:]) + "\n"
