"""Options: dataclasses that pydantic validates, and their fields: allowed values in words, docs."""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import pydantic.dataclasses
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from mtraining_jax.utils.errors import UserError

_BOUNDS = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}
_NOUNS = {int: "an integer", float: "a finite number"}
# Of options; a class that users derive options from has it as `__pydantic_config__`.
STRICT = ConfigDict(
    strict=True,
    extra="forbid",
    allow_inf_nan=False,
    arbitrary_types_allowed=True,
    use_attribute_docstrings=True,
)


@typing.dataclass_transform(frozen_default=True)
def options[T](cls: type[T] | None = None, *, kw_only: bool = False) -> Any:
    """Makes a class a frozen dataclass whose values are validated when it is constructed.

    A value of another type is an error, not converted (but an integer is a valid float). Types may
    have limits (`utils.limits`). The text below a field is its help text.

    Raises:
        UserError: by the constructor, with one line per wrong field; also for a ValueError of
            `__post_init__`.
    """
    if cls is None:
        return functools.partial(options, kw_only=kw_only)
    config = None if hasattr(cls, "__pydantic_config__") else STRICT  # else a base's
    made: Any = pydantic.dataclasses.dataclass(cls, frozen=True, kw_only=kw_only, config=config)
    validated = made.__init__

    @functools.wraps(validated)
    def __init__(self: Any, *positional: Any, **values: Any) -> None:
        if len(positional) > len(made.__match_args__):
            most = len(made.__match_args__)
            raise TypeError(f"{made.__name__} takes at most {most} positional arguments")
        values |= dict(zip(made.__match_args__, positional, strict=False))
        try:
            validated(self, **values)
        except ValidationError as error:
            raise UserError(_sentences(made, values, _wrong_fields(error))) from None

    made.__init__ = __init__
    return made


def make(cls: type, values: Mapping[str, Any]) -> Any:
    """Constructs options, or a dataclass derived from them, from values of its fields.

    Raises:
        UserError: with one line per wrong field.
    """
    made, wrong = construct([cls], values)
    if wrong:
        raise UserError(_sentences(cls, values, dict(wrong)))
    return made[0]


def construct(
    classes: Sequence[Any], values: Mapping[str, Any]
) -> tuple[list[Any], list[tuple[str, Any]]]:
    """Constructs options, or dataclasses derived from them, from one table of values.

    Args:
        classes: a field that several of them have belongs to the first one.
        values: by field; 1e6 is a valid integer, and a list a tuple. Others are ignored.

    Returns:
        The objects, and the names of wrong fields with what pydantic found. A problem of several
        fields has an empty name, and is text.
    """
    made, wrong, left = [], [], dict(values)
    for cls in classes:
        names = [name for name in fields_of(cls) if name in left]
        own = {name: _integer(left.pop(name), fields_of(cls)[name]) for name in names}
        try:
            new = cls.__new__(cls)
            _validator(cls).validate_python(ArgsKwargs((), own), self_instance=new)
            made.append(new)
        except ValidationError as error:
            wrong += _wrong_fields(error).items()
    return made, wrong


def _integer(value: Any, field: "Field") -> Any:
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole and int in field.kinds and float not in field.kinds else value


@functools.cache
def _validator(cls: type) -> Any:
    return TypeAdapter(cls).validator


def _wrong_fields(error: ValidationError) -> dict[str, Any]:
    """The first problem of each field, see `construct`."""
    found: dict[str, Any] = {}
    for problem in error.errors(include_url=False):
        name = str(problem["loc"][0]) if problem["loc"] else ""
        found.setdefault(name, problem if name else str(problem.get("ctx", {}).get("error")))
    return found


def _sentences(cls: type, values: Mapping[str, Any], wrong: Mapping[str, Any]) -> str:
    """One line per wrong field, with values as in Python."""
    fields, lines = fields_of(cls), []
    for name, problem in wrong.items():
        if not name:
            lines.append(problem)
        elif name not in fields:
            lines.append(f"{cls.__name__} has no field {name}; it has {', '.join(fields)}")
        elif name not in values:
            lines.append(f"{name} is missing: it must be {fields[name].allowed}")
        else:
            lines.append(f"{name}={values[name]!r} must be {fields[name].allowed}")
    return "\n".join(lines)


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


@functools.cache
def fields_of(cls: type) -> dict[str, Field]:
    """The fields of a dataclass that its constructor takes, by name."""
    if "__dataclass_fields__" not in vars(cls):
        raise UserError(f"{cls.__module__}:{cls.__qualname__} must be a dataclass; add @options")
    hints, found = typing.get_type_hints(cls, include_extras=True), {}
    inherited = [vars(base).get("__pydantic_fields__", {}) for base in reversed(cls.__mro__)]
    docs = {
        name: x.description for fields in inherited for name, x in fields.items() if x.description
    }
    for field in dataclasses.fields(cls):
        make, name = field.default_factory, field.name
        default = field.default if make is dataclasses.MISSING else make()
        if field.init:
            found[name] = Field(name, hints[name], default, docs.get(name, ""))
    return found


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
