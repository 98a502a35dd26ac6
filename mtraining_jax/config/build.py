"""Builds the sections of a configuration from tables; reports all mistakes together."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mtraining_jax.config.help import nearest
from mtraining_jax.config.init_from import with_checkpoint, with_commits
from mtraining_jax.config.schema import Sections
from mtraining_jax.config.sections import DataConfig, RunConfig
from mtraining_jax.config.tables import Table, table_of, table_type
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import Field, fields_of, joined, shown, toml_value
from mtraining_jax.utils.limits import LARGEST_INT
from mtraining_jax.utils.text import did_you_mean

# A table of values by section and field, and its origin for messages.
Layer = tuple[str, Mapping[str, Any]]
Layers = Sequence[Layer]
Fields = Mapping[str, Field]  # by dotted name
_QUOTED = re.compile(r'"([^"]+)"')  # names among allowed values
# Fields of earlier versions and their defaults, which are in printed files and in checkpoints.
_REMOVED = {
    "audit.alarm_gap": 0.2,
    "audit.gradient_interval": 0,
    "audit.gradient_tokens": None,
    "sparsity.local_fraction": 0.0,
    "sparsity.max_density": 1.0,
}
_MANY = 5  # fewer names are seen at a glance, and float16 may not mean bfloat16


def merged(layers: Layers) -> tuple[dict[str, Any], dict[str, int]]:
    """Merges tables, the first one wins; also returns the layer of each field, by dotted name."""
    origins: dict[str, int] = {}

    def add(table: dict[str, Any], below: Mapping[str, Any], prefix: str, number: int) -> None:
        for key, value in below.items():
            if key not in table:
                origins[f"{prefix}{key}"] = number
                table[key] = {} if isinstance(value, dict) else value
            if isinstance(value, dict) and isinstance(table[key], dict):
                add(table[key], value, f"{prefix}{key}.", number)

    table: dict[str, Any] = {}
    for number, (_, below) in enumerate(layers):
        add(table, below, "", number)
    return table, origins


def with_data_of_training(table: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Fills unset fields of `eval.data`, if present, from `data`; also returns their names."""
    match {"data": {}, **table}:
        case {"eval": {"data": dict() as given} as held_out, "data": dict() as data}:
            pass
        case _:
            return dict(table), set()
    inherited = {
        name: value
        for name, value in data.items()
        # Evaluations do not reorder sequences, and options of a source belong to that source.
        if name != "balance" and ("source" not in given or name in fields_of(DataConfig))
    }
    filled = {f"eval.data.{name}" for name in inherited.keys() - given.keys()}
    return {**table, "eval": {**held_out, "data": inherited | given}}, filled


class Builder:
    """Builds the sections and collects all problems.

    The first layer has the overrides, which `problems` are of; the second one is the file of the
    configuration. `stored` values were saved by a run: they may have options of other plug-ins.
    """

    def __init__(self, layers: Layers, fields: Fields, problems: list[str], stored: bool) -> None:
        self._labels = [label for label, _ in layers]
        self._table, self._origins = merged(layers)
        self._fields, self._problems, self._stored = fields, problems, stored
        self._meant: set[str] = set()  # fields that were probably misspelled
        self._inherited: set[str] = set()  # fields of eval.data, reported as those of data

    def sections(self) -> dict[str, Any]:
        """The sections by name, or a UserError."""
        table = with_commits(self._table, self._stored)
        table = with_checkpoint(table, self._report)
        table, self._inherited = with_data_of_training(self._with_one_length(table))
        for name in table:
            if name not in fields_of(Sections):
                self._report_unknown(name)
        built = {}
        for name, field in fields_of(Sections).items():
            values = table.get(name, {})
            if isinstance(values, dict):
                built[name] = self._build(name, field.annotation, values)
            elif self._origins[name] == 0:
                way = f"set one of its fields: {name}.FIELD=VALUE"
                self._report(name, f"{name} is a section; {way}")
            else:
                self._report(name, f"{name} = {shown(values)} must be a section: write [{name}]")
        if self._problems:
            raise UserError("\n".join(self._problems))
        return built

    def _with_one_length(self, table: dict[str, Any]) -> dict[str, Any]:
        """Drops `run.steps` or `run.epochs`, whichever the other one overrides."""
        run = table.get("run")
        if not isinstance(run, dict) or "steps" not in run or run.get("epochs") is None:
            return table
        if run["steps"] in ("none", None):
            return {**table, "run": {name: run[name] for name in run if name != "steps"}}
        steps, epochs = (self._origins[f"run.{name}"] for name in ("steps", "epochs"))
        if steps == epochs and run["steps"] != RunConfig.steps:  # printed files have the default
            both = " and ".join(f"run.{name} = {shown(run[name])}" for name in ("steps", "epochs"))
            self._report("run.epochs", f"{both} are alternatives; remove one of them")
        other = "epochs" if steps < epochs else "steps"
        return {**table, "run": {name: run[name] for name in run if name != other}}

    def _build(self, prefix: str, kind: Any, values: dict[str, Any]) -> Any:
        """Builds a table, innermost first; None if there are problems."""
        table, known = table_of(kind, values), {}
        fields = table.fields
        for name, value in values.items():
            dotted = f"{prefix}.{name}"
            if name not in fields and dotted in _REMOVED:
                if value != _REMOVED[dotted]:
                    why = "is not possible: the field no longer exists"
                    self._report(dotted, f"{dotted} = {shown(value)} {why}")
            elif name not in fields:
                self._report_option(dotted, table, value)
            elif isinstance(value, dict) and (inner := table_type(fields[name])) is not None:
                known[name] = self._build(dotted, inner, value)
            else:
                known[name] = value
        made, wrong = table.construct(known)
        missing = []
        for name, problem in wrong:
            dotted = f"{prefix}.{name}"
            if not name:  # plug-ins name their fields as in Python: `top_p=0.5`
                pattern = rf"(?<![\w.])({'|'.join(fields)})( ?= ?| is )"
                text = re.sub(pattern, lambda m: f"{prefix}.{m[1]} {m[2].strip()} ", problem)
                self._problems.append(text)
            elif problem["type"] == "missing":
                missing.append(dotted)
            else:
                field = self._fields.get(dotted, fields[name])
                self._report(dotted, _not_allowed(dotted, field, values[name], problem))
        self._report_missing(prefix, missing)
        return made

    def _report(self, name: str, problem: str) -> None:
        if name not in self._inherited:
            origin = name
            while origin and origin not in self._origins:
                origin = origin.rpartition(".")[0]
            self._problems.append(f"{self._labels[self._origins.get(origin, 1)]}: {problem}")

    def _report_missing(self, prefix: str, names: Sequence[str]) -> None:
        missing = [name for name in names if name not in self._meant]
        if len(missing) == 1:
            allowed = self._fields[missing[0]].allowed
            self._report(missing[0], f"{missing[0]} is missing: it must be {allowed}")
        elif missing:
            way = 'set them, or inherit them with base = "NAME"'
            self._report(prefix, f"{', '.join(missing)} are missing; {way}")

    def _report_option(self, name: str, table: Table, value: Any) -> None:
        """Reports an unknown field, or the option of a plug-in that is not selected.

        Such options are ignored if they come from where another plug-in was selected, or if they
        have their default: files that an earlier version printed have the options of all plug-ins.
        """
        prefix, _, leaf = name.rpartition(".")
        kinds = table.kinds_with(leaf)
        if table.plugin is None or (not kinds and table.options is not None):
            self._report_unknown(name)
            return
        if table.options is None:  # the kind is unknown, and so are its options
            return
        selector = f"{prefix}.{table.plugin.selector}"
        if (origin := self._origins.get(name, 1)) > 0:
            is_default = any(_plain(field.default) == _plain(value) for field in kinds.values())
            if self._stored or is_default or origin > self._origins.get(selector, origin):
                return
        known, kind = joined([toml_value(kind) for kind in kinds]), toml_value(table.kind)
        belongs = f"{name} is an option of {selector} = {known}, but {selector} = {kind}"
        self._report(name, f"{belongs}; remove it or change {selector}")

    def _report_unknown(self, name: str) -> None:
        self._report(name, _unknown(name, self._fields))
        self._meant.add(nearest(name, self._fields) or "")


def _unknown(name: str, fields: Fields) -> str:
    """Error message for an unknown section or field."""
    head, sections = name.rpartition(".")[0], fields_of(Sections)
    what = "a field" if head else "a section or field"
    if not head and (close := difflib.get_close_matches(name, sections, 1)):
        return f"{name} is not a section; did you mean {close[0]}?"
    if name.endswith(".base"):
        return f"{name} is not a field; write base = ... above the first [section]"
    if near := nearest(name, fields):
        return f"{name} is not {what}; did you mean {near}?"
    if inside := [n for n in fields if n.rpartition(".")[0] == head and head]:
        leaves = ", ".join(n.rpartition(".")[2] for n in inside)
        return f"{name} is not a field; {head} has {leaves}"
    return f"{name} is not {what}; the sections are {', '.join(sections)}"


def _not_allowed(name: str, field: Field, value: Any, problem: Mapping[str, Any]) -> str:
    """The sentence for a problem that pydantic found in a field."""
    cause = problem.get("ctx", {}).get("error")
    # A plug-in that cannot be loaded or has moved.
    if isinstance(cause, UserError) and not str(cause).startswith("unknown "):
        return f"{name}: {cause}"
    most = ""
    if isinstance(value, int) and value > LARGEST_INT and int in field.kinds:
        most = f", at most {LARGEST_INT}" if "less than" not in field.allowed else ""
    names, hint = _QUOTED.findall(field.allowed), None
    if isinstance(value, str) and len(names) >= _MANY:
        hint = did_you_mean(value, names)
    rule = f"; {hint} It" if hint else ": it"
    return f"{name} = {shown(value)} is not allowed{rule} must be {field.allowed}{most}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
