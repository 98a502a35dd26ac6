"""Loads a validated `Config` from a TOML file and overrides."""

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mtraining_jax.config.files import read_chain
from mtraining_jax.config.held_out import with_data_of_training
from mtraining_jax.config.init_from import with_checkpoint
from mtraining_jax.config.renamed import RENAMED, current_name, with_current_names
from mtraining_jax.config.schema import Config
from mtraining_jax.config.tables import Table, all_fields, nearest, table_of, table_type
from mtraining_jax.config.validate import validate
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import Field, fields_of, joined, shortened, toml_value
from mtraining_jax.utils.limits import LARGEST_INT

# Dotted field name and value as text; None if an option of the command line has no value.
Overrides = Sequence[tuple[str, str | None]]
_COMMAND_LINE = "command line"


def load_config(name_or_path: str | Path, overrides: Overrides = ()) -> Config:
    """Loads and validates the configuration of a run.

    Args:
        name_or_path: a name from `available_configs()`, or the path of a TOML file.
        overrides: pairs of dotted field name and value as text, parsed as TOML or else as a plain
            string. Later overrides win. None is the value of a boolean field that is true.

    Raises:
        UserError: one line per problem.
    """
    files = read_chain(name_or_path)
    default_name = {"run": {"name": files[0][0].stem}}
    layers = [(str(path), table) for path, table in files]
    config = _load([*layers, ("default", default_name)], overrides)
    validate(config)
    return config


def config_from_dict(table: Mapping[str, Any], source: str) -> Config:
    """Builds and validates a `Config` from a nested dict, the inverse of `config_to_dict`.

    Raises:
        UserError: one line per problem.
    """
    config = _load([(source, table)])
    validate(config)
    return config


def config_of_model(table: Mapping[str, Any], source: str, overrides: Overrides = ()) -> Config:
    """Builds a `Config` for inference: validates single fields only, and needs no training data.

    Options of plug-ins that are not selected are ignored.

    Args:
        table: values by section and field; lists or tuples for lists.
        source: origin of the values, for error messages.
        overrides: as in `load_config`.

    Raises:
        UserError: one line per problem.
    """
    return _load([(source, table)], overrides, stored=True)


def fields_with(name_or_path: str | None, overrides: Overrides) -> dict[str, Field]:
    """All fields by dotted name, with those of the plug-ins that a file and overrides select."""
    try:
        files = [] if name_or_path is None else read_chain(name_or_path)
    except UserError:
        files = []
    layers = [(str(path), with_current_names(table)) for path, table in files]
    return all_fields(with_data_of_training(_merged([_naive(overrides), *layers]).table)[0])


@dataclasses.dataclass
class _Merged:
    """Tables merged field by field.

    Attributes:
        origins: the number of the layer that each field comes from, by dotted name; 0 wins.
    """

    table: dict[str, Any]
    origins: dict[str, int]


def _merged(layers: Iterable[tuple[str, Mapping[str, Any]]]) -> _Merged:
    merged = _Merged({}, {})

    def add(table: dict[str, Any], below: Mapping[str, Any], prefix: str, number: int) -> None:
        for key, value in below.items():
            if key not in table:
                merged.origins[f"{prefix}{key}"] = number
                table[key] = {} if isinstance(value, dict) else value
            if isinstance(value, dict) and isinstance(table[key], dict):
                add(table[key], value, f"{prefix}{key}.", number)

    for number, (_, table) in enumerate(layers):
        add(merged.table, table, "", number)
    return merged


def _naive(overrides: Overrides) -> tuple[str, dict[str, Any]]:
    """The overrides as a layer, parsed without knowing the types of fields."""
    table: dict[str, Any] = {}
    for name, text in overrides:
        try:
            put(table, name, tomllib.loads(f"value = {text}")["value"])
        except (ValueError, RecursionError):
            put(table, name, text)
    return _COMMAND_LINE, table


def put(table: dict[str, Any], name: str, value: Any) -> None:
    """Sets a dotted field of a nested dict; creates missing tables."""
    *folders, leaf = name.split(".")
    for folder in folders:
        if not isinstance(table.get(folder), dict):
            table[folder] = {}
        table = table[folder]
    table[leaf] = value


def parse_value(name: str, text: str | None, field: Field | None) -> Any:
    """Parses the command line value of a field; None if the field is unknown.

    Accepts `none` for optional fields, booleans in any case, strings without quotes and lists of
    one item without brackets.
    """
    kinds = frozenset() if field is None else field.kinds
    if text is None:
        if field is None or bool in kinds:
            return True
        raise UserError(f"{name} needs a value: --{name}=VALUE")
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        table = tomllib.loads(f"value = {text}")
        value = table["value"] if len(table) == 1 else text
    except (ValueError, RecursionError):
        if list in kinds and text.startswith("["):
            raise UserError(
                f'{name}={text} is not a TOML list; write it like ["one", "two"]'
            ) from None
        value = text
    if not isinstance(value, str) and type(value) not in kinds and kinds & {str, list}:
        value = text
    if isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds:
        value = int(value)  # 1e6
    return [value] if list in kinds and isinstance(value, str) else value


def _load(
    layers: Sequence[tuple[str, Mapping[str, Any]]], overrides: Overrides = (), stored: bool = False
) -> Config:
    """Builds a configuration from tables of values with their origin; the first one wins."""
    layers = [(label, with_current_names(table)) for label, table in layers]
    overrides = [(current_name(name), text) for name, text in overrides]
    for _, table in layers:
        all_fields(table)  # loads their plug-ins, so that options of those are known
    selected = _merged([_naive(overrides), *layers]).table
    fields = all_fields(with_data_of_training(selected)[0])
    given: dict[str, Any] = {}
    problems: list[str] = []
    for name, text in overrides:
        try:
            put(given, name, parse_value(name, text, fields.get(name)))
        except UserError as error:
            problems.append(f"{_COMMAND_LINE}: {error}")
    return _Builder([(_COMMAND_LINE, given), *layers], fields, problems, stored).config()


class _Builder:
    """Builds the sections and collects all problems.

    Args:
        fields: all fields by dotted name.
        stored: whether the values were saved by a run: they may have options of other plug-ins.
    """

    def __init__(
        self,
        layers: Sequence[tuple[str, Mapping[str, Any]]],
        fields: Mapping[str, Field],
        problems: list[str],
        stored: bool,
    ) -> None:
        self._labels = [label for label, _ in layers]
        self._merged = _merged(layers)
        self._fields, self._problems, self._stored = fields, problems, stored
        self._meant: set[str] = set()  # fields that were probably misspelled
        self._inherited: set[str] = set()  # fields of eval.data, reported as those of data

    def config(self) -> Config:
        table = with_checkpoint(self._merged.table, self._report)
        table, self._inherited = with_data_of_training(table)
        built = {}
        for name in table:
            if name not in fields_of(Config):
                self._report_unknown(name)
        for name, field in fields_of(Config).items():
            values = table.get(name, {})
            if isinstance(values, dict):
                built[name] = self._build(name, field.annotation, values)
            elif isinstance(values, field.annotation):
                built[name] = values
            elif self._merged.origins[name] == 0:
                self._report(name, _section(name))
            else:
                self._report(name, f"{name} = {_shown(values)} must be a section: write [{name}]")
        if self._problems:
            raise UserError("\n".join(self._problems))
        return Config(**built)

    def _build(self, prefix: str, kind: Any, values: dict[str, Any]) -> Any:
        """Builds a table, innermost first; None if there are problems."""
        table, before = table_of(kind, values), len(self._problems)
        fields, converted = table.fields, {}
        for name, value in values.items():
            dotted = f"{prefix}.{name}"
            if name not in fields:
                self._report_option(dotted, table, value)
                continue
            inner = table_type(fields[name])
            if inner is not None and isinstance(value, dict):
                converted[name] = self._build(dotted, inner, value)
                continue
            try:
                converted[name] = fields[name].converted(value)
            except ValidationError:
                field = self._fields.get(dotted, fields[name])
                self._report(dotted, _not_allowed(dotted, field, value))
        if table.plugin is not None and table.options is None:
            self._report_kind(f"{prefix}.{table.plugin.selector}", table)
        self._report_missing(prefix, fields, values)
        if len(self._problems) > before:
            return None
        try:
            return table.build(converted)
        except ValidationError as error:
            text = error.errors()[0]["msg"].removeprefix("Value error, ")
        except ValueError as error:
            text = str(error)
        # Plug-ins name their fields as in Python.
        name = rf"(?<![\w.])({'|'.join(fields)})( ?= ?| is )"
        dotted = re.sub(name, lambda m: f"{prefix}.{m[1]}{m[2].replace('=', ' = ')}", text)
        self._problems.append(dotted.replace("  =  ", " = "))
        return None

    def _report(self, name: str, problem: str) -> None:
        if name not in self._inherited:
            origins, origin = self._merged.origins, name
            while origin and origin not in origins:
                origin = origin.rpartition(".")[0]
            self._problems.append(f"{self._labels[origins.get(origin, 1)]}: {problem}")

    def _report_kind(self, selector: str, table: Table) -> None:
        field, name = self._fields[selector], table.kind
        problem = _not_allowed(selector, field, name)
        if isinstance(name, str) and ":" in name and table.plugin is not None:
            try:
                table.plugin.classes.get(name)
            except UserError as error:
                problem = f"{selector}: {error}"
        self._report(selector, problem)

    def _report_missing(
        self, prefix: str, fields: Mapping[str, Field], values: Mapping[str, Any]
    ) -> None:
        names = [name for name, field in fields.items() if field.required and name not in values]
        missing = [f"{prefix}.{name}" for name in names if f"{prefix}.{name}" not in self._meant]
        if len(missing) == 1:
            allowed = self._fields[missing[0]].allowed
            self._report(missing[0], f"{missing[0]} is missing: it must be {allowed}")
        elif missing:
            self._report(
                prefix,
                f'{", ".join(missing)} are missing; set them, or inherit them with base = "NAME"',
            )

    def _report_option(self, name: str, table: Table, value: Any) -> None:
        """Reports an unknown field, or the option of a plug-in that is not selected.

        Such options are ignored if they come from where another plug-in was selected, or if they
        have their default: files that an earlier version printed have the options of all plug-ins.
        """
        prefix, _, leaf = name.rpartition(".")
        kinds = table.kinds_with(leaf)
        if table.plugin is None or not kinds:
            if table.plugin is None or table.options is not None:
                self._report_unknown(name)
            return
        selector, origins = f"{prefix}.{table.plugin.selector}", self._merged.origins
        origin = origins.get(name, 1)
        if origin > 0:
            is_default = any(_plain(field.default) == value for field in kinds.values())
            if self._stored or is_default or origin > origins.get(selector, origin):
                return
        known = joined([toml_value(kind) for kind in kinds])
        self._report(
            name,
            f"{name} is an option of {selector} = {known}, but {selector} = "
            f"{toml_value(table.kind)}; remove it or change {selector}",
        )

    def _report_unknown(self, name: str) -> None:
        self._report(name, _unknown(name, self._fields))
        self._meant.add(nearest(name, self._fields) or "")


def _section(name: str) -> str:
    return f"{name} is a section; set one of its fields: {name}.FIELD=VALUE"


def _unknown(name: str, fields: Mapping[str, Field]) -> str:
    """Error message for an unknown section or field."""
    head, sections = name.rpartition(".")[0], fields_of(Config)
    what = "a field" if head else "a section or field"
    if name in RENAMED:
        return f"{name} was renamed to {RENAMED[name]}"
    if not head and (close := difflib.get_close_matches(name, sections, 1)):
        return f"{name} is not a section; did you mean {close[0]}?"
    if near := nearest(name, fields):
        return f"{name} is not {what}; did you mean {near}?"
    if inside := [n for n in fields if n.rpartition(".")[0] == head and head]:
        leaves = ", ".join(n.rpartition(".")[2] for n in inside)
        return f"{name} is not a field; {head} has {leaves}"
    return f"{name} is not {what}; the sections are {', '.join(sections)}"


def _not_allowed(name: str, field: Field, value: Any) -> str:
    most = ""
    if isinstance(value, int) and value > LARGEST_INT and int in field.kinds:
        most = f", at most {LARGEST_INT}" if "less than" not in field.allowed else ""
    return f"{name} = {_shown(value)} is not allowed: it must be {field.allowed}{most}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    """A value nearly as the user wrote it, at most 80 characters."""
    try:
        text = toml_value(value)
    except TypeError:  # a TOML date or time
        text = str(value)
    except ValueError:  # Python limits the digits of a number
        return "a number of too many digits"
    return shortened(text)
