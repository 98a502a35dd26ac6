"""Sections with typed fields that plug-ins declare."""

import dataclasses
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import attribute_docs
from mtraining_jax.utils.plugins import Registry

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class FieldConflict(UserError):
    """A plug-in declares a field of another plug-in with another type or default."""

    def __init__(self, message: str, plugin: str) -> None:
        super().__init__(message)
        self.plugin = plugin


def assemble(name: str, base: Any, plugins: Mapping[str, type], selector: str) -> Any:
    """A section with the fields of `base` and of all plug-ins; `owners` maps fields to plug-ins.

    Types and limits (`utils.limits`) come from a plug-in's annotations, help texts from
    "Attributes:" in its docstring. Plug-ins may share a field. Fields of plug-ins that are not
    selected are validated but have no effect.

    Raises:
        FieldConflict: two plug-ins declare a field with different types or defaults.
    """
    inherited = set(base.__pydantic_fields__)
    fields: dict[str, tuple[Any, Any, str]] = {}
    owners: dict[str, list[str]] = {}
    for plugin, cls in plugins.items():
        hints, docs = typing.get_type_hints(cls, include_extras=True), attribute_docs(cls)
        for field in _own(cls):
            if field.name in inherited:
                continue
            found = hints[field.name], field.default, docs.get(field.name, "")
            before = fields.setdefault(field.name, found)
            if before[:2] != found[:2]:
                raise FieldConflict(
                    f'"{plugin}" cannot declare the field {field.name}: '
                    f"{_declaration(*found[:2])}, because {owners[field.name][0]} declares it as "
                    f"{_declaration(*before[:2])}; rename it, or use the same type and default",
                    plugin,
                )
            owners.setdefault(field.name, []).append(plugin)
    namespace: dict[str, Any] = {
        "__annotations__": {key: kind for key, (kind, _, _) in fields.items()},
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "owners": owners,
    }
    for key, (_, default, doc) in fields.items():
        help_text = f"{doc} ({selector} {', '.join(owners[key])})" if doc else ""
        # A plug-in's field cannot be required while another plug-in is selected.
        default = None if default is dataclasses.MISSING else default
        namespace[key] = Field(default=default, description=help_text or None)
    config: Any = STRICT | {"use_attribute_docstrings": False}
    made: Any = dataclass(frozen=True, kw_only=True, config=config)(type(name, (base,), namespace))
    for key in inherited:  # pydantic reads field docstrings from the source of their class only
        made.__pydantic_fields__[key].description = base.__pydantic_fields__[key].description
    return made


def _declaration(kind: Any, default: Any) -> str:
    """For example `int, Ge(ge=1) = 8`."""
    parts = [kind]
    if typing.get_origin(kind) is Annotated:
        parts = list(typing.get_args(kind))
    words = ", ".join(x.__name__ if isinstance(x, type) else str(x) for x in parts)
    return words if default is dataclasses.MISSING else f"{words} = {default!r}"


def with_fields_of[T](plugins: Mapping[str, type], selector: str) -> Callable[[type[T]], type[T]]:
    """Class decorator that adds the fields of a fixed set of plug-ins, see `assemble`."""
    return lambda base: assemble(base.__name__, base, plugins, selector)


@dataclasses.dataclass(frozen=True)
class Plugins:
    """Declares, as class variable `plugins` of a section, the plug-ins that add fields to it."""

    registry: Registry
    selector: str


def assembled(section: Any) -> Any:
    """The section (a class) with the fields of all plug-ins known so far.

    Raises:
        FieldConflict: a plug-in's field conflicts with another; the registry forgets the plug-in.
    """
    plugins = getattr(section, "plugins", None)
    if plugins is None:
        return section
    key = section, tuple(plugins.registry)
    if key not in _ASSEMBLED:
        classes = plugins.registry.classes()
        try:
            _ASSEMBLED[key] = assemble(section.__name__, section, classes, plugins.selector)
        except FieldConflict as error:
            plugins.registry.remove(error.plugin)
            raise
    return _ASSEMBLED[key]


_ASSEMBLED: dict[tuple[type, tuple[str, ...]], type] = {}


@dataclasses.dataclass(frozen=True)
class Described(AfterValidator):
    """Annotation of a field's type: a check, and its description in messages."""

    text: str


def one_of(registry: Registry) -> Described:
    """Annotates a field that selects a plug-in by name or as `package.module:Class`."""

    def check(name: str) -> str:
        registry.get(name)
        return name

    names = ", ".join(f'"{name}"' for name in registry.names)
    return Described(check, f"one of {names} or package.module:Class")


def key_of(names: Collection[str]) -> Described:
    """Annotates a field that must be one of the names."""

    def check(name: str) -> str:
        if name not in names:
            raise ValueError(name)
        return name

    *most, last = [f'"{name}"' for name in names]
    return Described(check, f"{', '.join(most)} or {last}")


def selected(section: Any, cls: type) -> dict[str, Any]:
    """A section's values for the fields of a plug-in, by name."""
    return {field.name: getattr(section, field.name) for field in _own(cls)}


def _own(cls: Any) -> Iterable[dataclasses.Field]:
    return (field for field in dataclasses.fields(cls) if field.init)
