"""Sections with typed fields that plug-ins declare."""

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from mtraining_jax.plugins import Registry, attribute_docs

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def assemble(name: str, base: type, plugins: Mapping[str, type], selector: str) -> type:
    """A section with the fields of `base` and of all plug-ins.

    Types and limits (`mtraining_jax.limits.limited`) come from a plug-in's annotations, help texts
    from "Attributes:" in its docstring. Plug-ins may share a field. Fields of plug-ins that are not
    selected are validated but have no effect.

    Args:
        name: name of the new class.
        base: a section (pydantic dataclass).
        plugins: dataclasses by name.
        selector: the field of `base` that selects a plug-in, for help texts.

    Returns:
        A pydantic dataclass derived from `base`; `owners` maps each added field to the names of its
        plug-ins.

    Raises:
        TypeError: two plug-ins declare a field with different types or defaults.
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
        # A plug-in's field cannot be required while another plug-in is selected.
        default = None if default is dataclasses.MISSING else default
        namespace[key] = Field(default=default, description=help_text or None)
    config = STRICT | {"use_attribute_docstrings": False}
    made = dataclass(frozen=True, kw_only=True, config=config)(type(name, (base,), namespace))
    for key in inherited:  # pydantic reads field docstrings from the source of their class only
        made.__pydantic_fields__[key].description = base.__pydantic_fields__[key].description
    return made


@dataclasses.dataclass(frozen=True)
class Plugins:
    """Declares, as class variable `plugins` of a section, the plug-ins that add fields to it.

    Attributes:
        registry: the plug-ins.
        selector: the field that selects a plug-in.
    """

    registry: Registry
    selector: str


def assembled(section: type) -> type:
    """The section with the fields of all plug-ins known so far."""
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
    """Annotation of a field's type: a description of valid values."""

    text: str


def one_of(registry: Registry) -> Any:
    """The type of a field that selects a plug-in by name or as `package.module:Class`."""

    def check(name: str) -> str:
        registry.get(name)
        return name

    names = ", ".join(f'"{name}"' for name in registry.names)
    words = InWords(f"one of {names} or package.module:Class")
    return Annotated[str, AfterValidator(check), words]


def selected(section: Any, cls: type) -> dict[str, Any]:
    """A section's values for the fields of a plug-in, by name."""
    return {field.name: getattr(section, field.name) for field in _own(cls)}


def _own(cls: type) -> Iterable[dataclasses.Field]:
    return (field for field in dataclasses.fields(cls) if field.init)
