"""Reflection on configuration fields: dotted names, allowed values as text, TOML formatting."""

import dataclasses
import difflib
import functools
import json
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic.fields import FieldInfo

from mtraining_jax.config.schema import Config
from mtraining_jax.config.sections import Described, assembled
from mtraining_jax.utils.limits import LARGEST_INT


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of the configuration.

    Attributes:
        allowed: description of valid values, e.g. `an integer (at least 1)`.
        kinds: accepted Python types; `NoneType` for optional fields, `dict` for tables of fields.
        default: its default, None if `required`.
    """

    name: str
    allowed: str
    kinds: frozenset[type]
    required: bool
    default: Any
    doc: str


def section_class(annotation: Any) -> Any:
    """The assembled section of an annotation `Section` or `Section | None`; otherwise None."""
    for option in (annotation, *typing.get_args(annotation)):
        if dataclasses.is_dataclass(option):
            return assembled(option)
    return None


def infos(section: Any) -> dict[str, FieldInfo]:
    """Pydantic's field descriptions of a section, by name."""
    return section.__pydantic_fields__


def sections() -> dict[str, type]:
    """The sections of `Config` by name, in order."""
    return {name: assembled(info.annotation) for name, info in infos(Config).items()}


def all_fields() -> Mapping[str, Field]:
    """All fields by dotted name; a table comes before its fields."""
    return _all_fields(tuple(sections().items()))


@functools.cache
def _all_fields(sections: tuple[tuple[str, type], ...]) -> Mapping[str, Field]:
    found: dict[str, Field] = {}

    def collect(prefix: str, section: type) -> None:
        for name, info in infos(section).items():
            dotted = f"{prefix}.{name}"
            found[dotted] = Field(
                name=dotted,
                allowed=_in_words(info.annotation, info.metadata),
                kinds=frozenset(_kinds(info.annotation)),
                required=info.is_required(),
                default=None if info.is_required() else info.default,
                doc=info.description or "",
            )
            if (inner := section_class(info.annotation)) is not None:
                collect(dotted, inner)

    for name, section in sections:
        collect(name, section)
    return types.MappingProxyType(found)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The closest match for a misspelled dotted `name`, or None.

    Preference: similar name in the same section, same name in another section, any similar name.
    """
    names = list(names)
    head, _, leaf = name.rpartition(".")
    siblings = [n for n in names if n.rpartition(".")[0] == head]
    if head and (close := difflib.get_close_matches(name, siblings, 1, cutoff=0.75)):
        return close[0]
    if same := [n for n in names if n.rpartition(".")[2] == leaf]:
        return same[0]
    close = difflib.get_close_matches(name, names, 1, cutoff=0.6)
    return close[0] if close else None


def toml_value(value: Any) -> str:
    """Formats a value as TOML (None as `none`)."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            # TOML basic strings are JSON strings, except for a raw DEL.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return "[" + ", ".join(map(toml_value, value)) + "]"
        case dict():
            items = (f"{toml_value(str(k))} = {toml_value(v)}" for k, v in value.items())
            return "{" + ", ".join(items) + "}"
    raise TypeError(f"{type(value).__name__} is not a configuration value type: {value!r}")


def _flatten(annotation: Any, metadata: Iterable[Any] = ()) -> Iterable[tuple[Any, list[Any]]]:
    """The members of a union with their limits; a plain type counts as a union of one."""
    limits = list(metadata)
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *extra = typing.get_args(annotation)
        for item in extra:
            limits += item.metadata if isinstance(item, FieldInfo) else [item]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for option in typing.get_args(annotation):
            yield from _flatten(option)
    else:
        yield annotation, limits


def _kinds(annotation: Any) -> Iterable[type]:
    for option, _ in _flatten(annotation):
        if typing.get_origin(option) is Literal:
            yield from {type(value) for value in typing.get_args(option)}
        elif typing.get_origin(option) is tuple:
            yield list
        elif dataclasses.is_dataclass(option):
            yield dict
        else:
            yield option


def _in_words(annotation: Any, metadata: Iterable[Any]) -> str:
    words = [_option_in_words(*option) for option in _flatten(annotation, metadata)]
    return " or ".join(words)


def _option_in_words(option: Any, limits: list[Any]) -> str:
    if option is type(None):
        return "none"
    if option is bool:
        return "true or false"
    if typing.get_origin(option) is Literal:
        *most, last = [toml_value(value) for value in typing.get_args(option)]
        return f"{', '.join(most)} or {last}" if most else last
    if typing.get_origin(option) is tuple:
        of_text = str in _kinds(typing.get_args(option)[0])
        return "a list of non-empty strings" if of_text else "a list of finite numbers"
    if dataclasses.is_dataclass(option):
        return f"a table of {', '.join(infos(assembled(option)))}"
    if words := [limit.text for limit in limits if isinstance(limit, Described)]:
        return words[0]
    if option is str:
        return "a non-empty string"
    words = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}
    bounds = [
        f"{words[name]} {getattr(limit, name)}"
        for limit in limits
        for name in words
        # Mentioned in errors only, to keep the help text short.
        if hasattr(limit, name) and (name, getattr(limit, name)) != ("le", LARGEST_INT)
    ]
    noun = {int: "an integer", float: "a finite number"}[option]
    return f"{noun} ({' and '.join(bounds)})" if bounds else noun
