"""Reflection on the fields of dataclasses: types with limits, allowed values in words, docs."""

import dataclasses
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter

from mtraining_jax.utils.errors import UserError

_BOUNDS = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}
_NOUNS = {int: "an integer", float: "a finite number"}


@dataclasses.dataclass(frozen=True)
class Field:
    """A typed field."""

    name: str
    annotation: Any
    default: Any = dataclasses.MISSING  # if required
    doc: str = ""
    words: str | None = None  # valid values, if they do not follow from the type

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @functools.cached_property
    def options(self) -> list[tuple[Any, list[Any]]]:
        """The members of a union with their limits; another type counts as a union of one."""
        return list(_options(self.annotation))

    @functools.cached_property
    def allowed(self) -> str:
        """Description of valid values, e.g. `an integer (at least 1) or none`."""
        if self.words is not None:
            return self.words
        return " or ".join(_in_words(*option) for option in self.options)

    @functools.cached_property
    def kinds(self) -> frozenset[type]:
        """Accepted Python types; `NoneType` for optional fields, `dict` for tables of fields."""
        return frozenset(kind for kind, _ in self.options for kind in _kinds(kind))

    def converted(self, value: Any) -> Any:
        """Converts a value to the field's type, e.g. lists to tuples, or raises ValidationError."""
        return self._adapter.validate_python(value)

    @functools.cached_property
    def _adapter(self) -> TypeAdapter:
        config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
        return TypeAdapter(self.annotation, config=config)


@functools.cache
def fields_of(cls: type) -> dict[str, Field]:
    """The fields of a dataclass that its constructor takes, by name."""
    if not dataclasses.is_dataclass(cls):
        way = "add @dataclasses.dataclass(frozen=True)"
        raise UserError(f"{cls.__module__}:{cls.__qualname__} must be a dataclass; {way}")
    hints, docs = typing.get_type_hints(cls, include_extras=True), attribute_docs(cls)
    return {
        field.name: Field(field.name, hints[field.name], _default(field), docs.get(field.name, ""))
        for field in dataclasses.fields(cls)
        if field.init
    }


def _default(field: dataclasses.Field) -> Any:
    make = field.default_factory
    return field.default if make is dataclasses.MISSING else make()


def attribute_docs(cls: type) -> dict[str, str]:
    """Descriptions of fields, from pydantic or else from "Attributes:" in the docstrings."""
    if dataclass_fields := getattr(cls, "__pydantic_fields__", None):
        return {name: field.description or "" for name, field in dataclass_fields.items()}
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        _, _, text = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition("Attributes:\n")
        text = re.split(r"^\S", text, maxsplit=1, flags=re.MULTILINE)[0]
        for names, doc in re.findall(r"^ {4}(\w.*?):(.*(?:\n {5}.*)*)", text, re.MULTILINE):
            docs |= dict.fromkeys(names.split(", "), " ".join(doc.split()))
    return docs


def toml_value(value: Any) -> str:
    """Formats a value as TOML (None as `none`)."""
    match value:
        case None:
            return "none"
        case bool() | str():
            # TOML basic strings are JSON strings, except for a raw DEL.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int() | float():
            return repr(value)
        case list() | tuple():
            return "[" + ", ".join(map(toml_value, value)) + "]"
        case dict():
            items = (f"{toml_value(str(k))} = {toml_value(v)}" for k, v in value.items())
            return "{" + ", ".join(items) + "}"
    raise TypeError(f"{type(value).__name__} is not a configuration value type: {value!r}")


def shortened(text: str, limit: int = 80) -> str:
    """Cuts a text to at most `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def joined(words: typing.Sequence[str], last: str = "or") -> str:
    """`a, b or c`."""
    return f" {last} ".join([*([", ".join(words[:-1])] if words[:-1] else []), *words[-1:]])


def _options(annotation: Any) -> Iterator[tuple[Any, list[Any]]]:
    limits: list[Any] = []
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *limits = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for option in typing.get_args(annotation):
            yield from _options(option)
    else:
        yield annotation, limits


def _kinds(option: Any) -> set[type]:
    if typing.get_origin(option) is Literal:
        return {type(value) for value in typing.get_args(option)}
    if typing.get_origin(option) is tuple:
        return {list}
    return {dict} if dataclasses.is_dataclass(option) else {option}


def _in_words(option: Any, limits: list[Any]) -> str:
    if option is type(None):
        return "none"
    if option is bool:
        return "true or false"
    if words := [limit.words for limit in limits if hasattr(limit, "words")]:
        return words[0]
    if option is str:
        return "a non-empty string"
    if typing.get_origin(option) is Literal:
        return joined([toml_value(value) for value in typing.get_args(option)])
    if typing.get_origin(option) is tuple:
        (kind, _), *_ = _options(typing.get_args(option)[0])
        return "a list of non-empty strings" if kind is str else "a list of finite numbers"
    # The largest integer is mentioned in errors only, to keep the help text short.
    bounds = [
        f"{words} {getattr(limit, name)}"
        for limit in limits
        for name, words in _BOUNDS.items()
        if hasattr(limit, name) and getattr(limit, name) < 2**53 - 1
    ]
    noun = _NOUNS.get(option, f"a {getattr(option, '__name__', option)}")
    return f"{noun} ({' and '.join(bounds)})" if bounds else noun
