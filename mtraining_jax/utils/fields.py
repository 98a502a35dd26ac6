"""Options: dataclasses that pydantic validates, and their fields: allowed values in words, docs."""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import pydantic.dataclasses
from pydantic import ConfigDict, ValidationError

from mtraining_jax.utils.errors import UserError

_BOUNDS = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}
_NOUNS = {int: "an integer", float: "a finite number"}
_STRICT = ConfigDict(
    strict=True,
    extra="forbid",
    allow_inf_nan=False,
    arbitrary_types_allowed=True,
    use_attribute_docstrings=True,
)


class WrongFields(UserError):
    """Values that options reject; the message has one line per wrong field.

    Attributes:
        problems: what pydantic found, by field; text for a combination of fields, by "".
    """

    def __init__(self, cls: type, values: Mapping[str, Any], error: ValidationError) -> None:
        self.problems: dict[str, Any] = {}
        for problem in error.errors(include_url=False):
            name = str(problem["loc"][0]) if problem["loc"] else ""
            cause = problem.get("ctx", {}).get("error")
            self.problems.setdefault(name, problem if name else str(cause))
        fields, lines = fields_of(cls), []
        for name, problem in self.problems.items():
            if not name:
                lines.append(problem)
            elif name not in fields:
                lines.append(f"{cls.__name__} has no field {name}; it has {', '.join(fields)}")
            elif name not in values:
                lines.append(f"{name} is missing: it must be {fields[name].allowed}")
            else:
                lines.append(f"{name}={shown(values[name], repr)} must be {fields[name].allowed}")
        super().__init__("\n".join(lines))


@typing.dataclass_transform(frozen_default=True)
def options[T](cls: type[T] | None = None, *, kw_only: bool = False) -> Any:
    """Makes a class a frozen dataclass that validates its values when it is constructed.

    A value of another type is an error, not converted (but an integer is a valid float). Types may
    have limits (`utils.limits`). The text below a field is its help text.

    Raises:
        WrongFields: by the constructor, also for a ValueError of `__post_init__`.
    """
    if cls is None:
        return functools.partial(options, kw_only=kw_only)
    made: Any = pydantic.dataclasses.dataclass(cls, frozen=True, kw_only=kw_only, config=_STRICT)
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
            raise WrongFields(made, values, error) from None

    made.__init__ = __init__
    return made


def construct(
    classes: Sequence[Any], values: Mapping[str, Any]
) -> tuple[list[Any], list[tuple[str, Any]]]:
    """Constructs options of several classes from one table of values.

    Args:
        classes: a field that several of them have belongs to the first one.
        values: by field; 1e6 is a valid integer. Others are ignored.

    Returns:
        The objects, and problems as in `WrongFields`.
    """
    made, wrong, left = [], [], dict(values)
    for cls in classes:
        own = {}
        for name, field in fields_of(cls).items():
            if name in left:
                own[name] = value = left.pop(name)
                if isinstance(value, float) and value.is_integer() and float not in field.kinds:
                    own[name] = int(value) if int in field.kinds else value
        try:
            made.append(cls(**own))
        except WrongFields as error:
            wrong += error.problems.items()
    return made, wrong


@dataclasses.dataclass(frozen=True)
class Field:
    """A typed field."""

    name: str
    annotation: Any
    default: Any = dataclasses.MISSING  # if required
    doc: str = ""
    words: str | None = None  # valid values, if they do not follow from the type
    is_option: bool = True  # False if only Python sets it

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
    """The fields of options that the constructor takes, by name."""
    if "__pydantic_fields__" not in vars(cls):
        way = "decorate the class with mtraining_jax.options"
        raise UserError(f"{cls.__module__}:{cls.__qualname__} declares no options: {way}")
    hints, found = typing.get_type_hints(cls, include_extras=True), {}
    inherited = [vars(base).get("__pydantic_fields__", {}) for base in reversed(cls.__mro__)]
    infos = {name: x for fields in inherited for name, x in fields.items()}
    docs = {
        name: x.description for fields in inherited for name, x in fields.items() if x.description
    }
    for field in dataclasses.fields(cls):
        make, name = field.default_factory, field.name
        default = field.default if make is dataclasses.MISSING else make()
        if field.init:
            is_option = not infos[name].exclude
            doc = docs.get(name, "")
            found[name] = Field(name, hints[name], default, doc, is_option=is_option)
    return found


def options_of(cls: Any) -> dict[str, Field]:
    """The fields that files and the command line may set, by name."""
    return {name: field for name, field in fields_of(cls).items() if field.is_option}


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


def shown(value: Any, write: Callable[[Any], str] = toml_value) -> str:
    """A value nearly as the user wrote it, at most 80 characters."""
    try:
        text = write(value)
    except TypeError:  # a TOML date or time
        text = str(value)
    except ValueError:  # Python limits the digits of a number
        return "a number of too many digits"
    return shortened(text)


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
