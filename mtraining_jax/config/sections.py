"""Sections whose fields come from plug-ins: flat, typed, declared by the plug-in that uses them."""

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from mtraining_jax.plugins import Registry, attribute_docs

STRICT = ConfigDict(
    strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
)


def assemble(name: str, base: type, plugins: Mapping[str, type], selector: str) -> type:
    """A section with the fields of `base` and then those of every plug-in, all flat.

    A plug-in is a dataclass; its annotations give the types, which may carry limits
    (`mtraining_jax.limits.limited`), and the "Attributes:" of its docstring the help. A field that
    several plug-ins have is one field. A field of one plug-in may be set while another is
    selected: it is checked and has no effect.

    Args:
        name: of the new class.
        base: a section, a pydantic dataclass.
        plugins: dataclasses by the name that selects them.
        selector: the field of `base` that selects one, for the help.

    Returns:
        A pydantic dataclass derived from `base`. `owners` maps each added field to the names of
        the plug-ins that have it.

    Raises:
        TypeError: if two plug-ins disagree about the type or default of a field.
    """
    inherited = set(base.__pydantic_fields__)
    fields: dict[str, tuple[Any, Any, str]] = {}
    owners: dict[str, list[str]] = {}
    for plugin, cls in plugins.items():
        hints, docs = typing.get_type_hints(cls, include_extras=True), attribute_docs(cls)
        for field in dataclasses.fields(cls):
            if field.name in inherited or not field.init:
                continue
            found = hints[field.name], field.default, docs.get(field.name, "")
            before = fields.setdefault(field.name, found)
            if before[:2] != found[:2]:
                raise TypeError(
                    f"{plugin} declares {field.name}: {found[0]} = {found[1]!r}, and "
                    f"{owners[field.name][0]} {before[0]} = {before[1]!r}"
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
        # A plug-in's field without a default cannot be required where another is selected.
        default = None if default is dataclasses.MISSING else default
        namespace[key] = Field(default=default, description=help_text or None)
    config = STRICT | {"use_attribute_docstrings": False}
    made = dataclass(frozen=True, kw_only=True, config=config)(type(name, (base,), namespace))
    for key in inherited:  # docstrings under a field are read from a class's own source only
        made.__pydantic_fields__[key].description = base.__pydantic_fields__[key].description
    return made


@dataclasses.dataclass(frozen=True)
class Plugins:
    """In a section, as its class variable `plugins`: where its further fields come from.

    Attributes:
        registry: of the plug-ins.
        selector: the field of the section that names one.
    """

    registry: Registry
    selector: str


def assembled(section: type) -> type:
    """A section with the fields of all plug-ins known so far; itself if it has no plug-ins."""
    plugins = getattr(section, "plugins", None)
    if plugins is None:
        return section
    key = section, tuple(plugins.registry)
    if key not in _ASSEMBLED:
        classes = plugins.registry.classes()
        _ASSEMBLED[key] = assemble(section.__name__, section, classes, plugins.selector)
    return _ASSEMBLED[key]


_ASSEMBLED: dict[tuple[type, tuple[str, ...]], type] = {}


@dataclasses.dataclass(frozen=True)
class InWords:
    """In the type of a field: what the field allows, in words."""

    text: str


def one_of(registry: Registry) -> Any:
    """The type of a field that selects a plug-in: a name, or `package.module:Name`."""

    def check(name: str) -> str:
        registry.get(name)
        return name

    names = ", ".join(f'"{name}"' for name in registry.names)
    words = InWords(f"one of {names} or your own as package.module:Name")
    return Annotated[str, AfterValidator(check), words]


def selected(section: Any, cls: type) -> dict[str, Any]:
    """The values of a section that a plug-in's dataclass takes, by field."""
    return {field.name: getattr(section, field.name) for field in _own(cls)}


def _own(cls: type) -> Iterable[dataclasses.Field]:
    return (field for field in dataclasses.fields(cls) if field.init)
