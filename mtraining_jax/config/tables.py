"""The tables of a configuration file, whose fields may depend on the kind of a plug-in."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import Field, construct, fields_of, joined, options_of, toml_value
from mtraining_jax.utils.plugins import Registry


@dataclasses.dataclass(frozen=True, eq=False)
class OptionsOf:
    """Marks a field that holds the options of one of several classes.

    In files and on the command line they are fields of the table itself, next to the selector.
    """

    selector: str  # name of the field that selects the class: kind, source, type
    classes: Registry | Mapping[str, Any]  # by name
    default: str  # name of the class that is selected by default
    doc: str  # help text of the selector

    @property
    def field(self) -> Field:
        """The selector."""
        names = joined([toml_value(name) for name in self.classes])
        words = self.classes.words if isinstance(self.classes, Registry) else names
        return Field(self.selector, str, self.default, self.doc, words)

    def default_options(self) -> Any:
        """The options of the default class, with their defaults."""
        cls: Any = self.classes.get(self.default)
        return cls()


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a file: a section, with the options of a plug-in if one belongs to it."""

    section: Any  # class of the section; None if there are only options
    plugin: OptionsOf | None = None  # selects the class of the options
    holder: str = ""  # field of the section that holds the options
    kind: Any = None  # the selected kind of plug-in
    options: Any = None  # class of its options; None if the kind is unknown
    problem: UserError | None = None  # of the class, e.g. that its module cannot be imported

    @property
    def fields(self) -> dict[str, Field]:
        """The selector, the fields of the section and the options of the selected kind."""
        own = {} if self.plugin is None else {self.plugin.selector: self.plugin.field}
        own |= {} if self.section is None else fields_of(self.section)
        own.pop(self.holder, None)
        options = {} if self.options is None else options_of(self.options)
        return own | options | own  # a field of the section hides an option of the same name

    def kinds_with(self, name: str) -> dict[str, Field]:
        """The known kinds that have an option of this name, and the option."""
        if self.plugin is None:
            return {}
        options = {kind: options_of(self.plugin.classes.get(kind)) for kind in self.plugin.classes}
        return {kind: fields[name] for kind, fields in options.items() if name in fields}

    def construct(self, values: Mapping[str, Any]) -> tuple[Any, list[tuple[str, Any]]]:
        """The section or options, or None, and what is wrong: see `fields.construct`."""
        classes = [cls for cls in (self.section, self.options) if cls is not None]
        made, wrong = construct(classes, values)
        if self.plugin is not None and self.options is None:
            problem = {"type": "plug-in", "ctx": {"error": self.problem}}
            wrong.insert(0, (self.plugin.selector, problem))
        if wrong:
            return None, wrong
        whole, *held = made
        return (dataclasses.replace(whole, **{self.holder: held[0]}) if held else whole), []


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
    get = values.get if isinstance(values, Mapping) else lambda name: getattr(values, name, None)
    selected, options, problem = get(plugin.selector), None, None
    selected = plugin.default if selected is None else selected
    try:
        options = plugin.classes.get(selected) if isinstance(selected, str) else None
    except UserError as error:
        problem = error
    return Table(section, plugin, holder, selected, options, problem)


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
