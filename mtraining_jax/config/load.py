"""Loads a validated `Config` from a TOML file and overrides."""

import contextlib
import copy
import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mtraining_jax.config.base import read_with_base
from mtraining_jax.config.fields import (
    Field,
    all_fields,
    infos,
    nearest,
    section_class,
    sections,
    toml_value,
)
from mtraining_jax.config.held_out import with_data_of_training
from mtraining_jax.config.init_from import with_checkpoint
from mtraining_jax.config.renamed import RENAMED, with_new_names
from mtraining_jax.config.schema import Config
from mtraining_jax.config.validate import validate
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.file_limits import absence, read_text
from mtraining_jax.utils.limits import LARGEST_INT
from mtraining_jax.utils.plugins import Registry

_PACKAGE = Path(__file__).resolve().parents[1]
_COMMAND_LINE = "command line"


def config_folder() -> Path:
    """The folder of named configurations, in the checkout or the installed package."""
    checkout = _PACKAGE.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / "configs").is_dir():
        return checkout / "configs"
    return _PACKAGE / "configs"


def available_configs() -> list[str]:
    """Sorted names of the configurations in `config_folder()`."""
    return sorted(path.stem for path in config_folder().glob("*.toml"))


def load_config(name_or_path: str | Path, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """Loads and validates the configuration of a run.

    Args:
        name_or_path: a name from `available_configs()`, or the path of a TOML file.
        overrides: pairs of dotted field name and value as text, parsed as TOML or else as a plain
            string. Later overrides win.

    Raises:
        UserError: one line per problem.
    """
    path = _find(str(name_or_path))
    load_own_plugins(str(name_or_path), overrides)
    table, origins = read_with_base(path, _read, _find)
    problems: list[str] = []
    for name, text in overrides:
        try:
            _put(table, name, parse_value(name, text))
        except UserError as error:
            problems.append(f"{_COMMAND_LINE}: {error}")
        else:
            inside = [other for other in origins if other.startswith(f"{name}.")]
            origins = {other: origins[other] for other in origins if other not in inside}
            origins[name] = _COMMAND_LINE
    run = table.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", path.stem)
    config = _build(table, str(path), origins, problems)
    validate(config)
    return config


def config_from_dict(table: Mapping[str, Any], source: str) -> Config:
    """Builds and validates a `Config` from a nested dict, the inverse of `config_to_dict`.

    Raises:
        UserError: one line per problem.
    """
    config = _build(dict(table), source, {}, [])
    validate(config)
    return config


def config_of_model(
    table: Mapping[str, Any], source: str, overrides: Sequence[tuple[str, str]] = ()
) -> Config:
    """Builds a `Config` for inference: validates single fields only, and needs no training data.

    Args:
        table: values by section and field; lists or tuples for lists.
        source: origin of the values, for error messages.
        overrides: pairs of dotted field name and value as text.

    Raises:
        UserError: one line per problem.
    """
    table = copy.deepcopy(dict(table))
    with_overrides = copy.deepcopy(table)
    for name, text in overrides:
        if "." in name:
            _put(with_overrides, name, text)
    for _, name, registry in _own_plugins(with_overrides):
        with contextlib.suppress(UserError):  # reported below
            registry.get(name)
    problems: list[str] = []
    origins: dict[str, str] = {}
    for name, text in overrides:
        try:
            _put(table, name, parse_value(name, text))
            origins[name] = _COMMAND_LINE
        except UserError as error:
            problems.append(f"{_COMMAND_LINE}: {error}")
    return _build(table, source, origins, problems)


def load_own_plugins(name_or_path: str | None, overrides: Iterable[tuple[str, str]] = ()) -> None:
    """Imports plug-ins given as `package.module:Class`, so that their fields are known.

    `load_config` reports the errors that are ignored here.
    """
    try:
        if name_or_path is None:
            table = {}
        else:
            table, _ = read_with_base(_find(name_or_path), _read, _find)
    except UserError:
        table = {}
    for dotted, text in overrides:
        _put(table, dotted, text)
    for _, name, registry in _own_plugins(table):
        with contextlib.suppress(UserError):
            registry.get(name)


def parse_value(name: str, text: str) -> Any:
    """Parses the command line value of a field.

    Accepts `none` for optional fields, booleans in any case, strings without quotes and lists of
    one item without brackets.
    """
    fields = all_fields()
    if name not in fields:
        raise UserError(_unknown(name, fields))
    kinds = fields[name].kinds
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


def _find(name: str) -> Path:
    """Resolves a name or path to a file."""
    path = Path(name).expanduser()
    if path.suffix == ".toml" or len(path.parts) > 1:
        return path
    names = available_configs()
    if name in names:
        path = config_folder() / f"{name}.toml"
        near = path.is_relative_to(Path.cwd())  # shorter in messages
        return path.relative_to(Path.cwd()) if near else path
    close = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {close[0]}? Choose" if close else "choose"
    raise UserError(
        f'unknown configuration "{name}"; {hint} one of {", ".join(names)} or pass the path of a '
        ".toml file"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path)
    except UserError:
        raise
    except FileNotFoundError:
        others = [str(other) for other in path.parent.glob("*.toml") if other.is_file()]
        close = difflib.get_close_matches(str(path), others, 1)
        if path.stem in available_configs():
            close = [f"--config {path.stem}"]
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"the configuration file {path} {absence(path)}{hint}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: invalid byte at {error.start}") from error
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))  # byte-order mark
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error
    except ValueError as error:  # Python limits the digits of a number
        raise UserError(f"{path} has a number of too many digits") from error


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    """Sets a dotted field of a nested dict; creates missing tables."""
    *folders, leaf = name.split(".")
    for folder in folders:
        if table.get(folder) is None:
            table[folder] = {}
        table = table[folder]
        if not isinstance(table, dict):
            return  # `_build` reports it
    table[leaf] = value


def _build(
    table: dict[str, Any], source: str, origins: Mapping[str, str], problems: list[str]
) -> Config:
    """Builds the dataclasses, innermost first; raises all problems together."""
    meant: set[str] = set()
    inherited: set[str] = set()  # fields of eval.data that are reported as those of data

    def say(name: str, problem: str) -> None:
        if name not in inherited:
            problems.append(f"{_origin(name, origins, source)}: {problem}")

    before = len(problems)
    for dotted, plugin, registry in _own_plugins(table):
        try:
            registry.get(plugin)
        except UserError as error:
            say(dotted, f"{dotted}: {error}")
    if len(problems) > before:  # the fields of these plug-ins are unknown
        raise UserError("\n".join(problems))
    table = with_checkpoint(with_new_names(table), say)
    table, filled = with_data_of_training(table)
    inherited |= filled
    fields = all_fields()

    def unknown(name: str) -> None:
        say(name, _unknown(name, fields))
        meant.add(nearest(name, fields) or "")

    def build(prefix: str, section: type, values: dict[str, Any]) -> Any:
        known = infos(section)
        for name in values:
            if name not in known:
                unknown(f"{prefix}.{name}")
        built = {}
        for name, value in values.items():
            if name not in known:
                continue
            inner = section_class(known[name].annotation)
            if inner is not None and isinstance(value, dict):
                value = build(f"{prefix}.{name}", inner, value)
            built[name] = value
        try:
            return section(**built)
        except ValidationError as error:
            missing = []
            for loc in dict.fromkeys(str(e["loc"][0]) for e in error.errors()):
                field = fields[f"{prefix}.{loc}"]
                if loc not in built:
                    missing += [field] if field.name not in meant else []
                elif built[loc] is not _BROKEN:
                    say(field.name, _not_allowed(field, built[loc]))
            if len(missing) == 1:
                (field,) = missing
                say(field.name, f"{field.name} is missing: it must be {field.allowed}")
            elif missing:
                names = ", ".join(field.name for field in missing)
                say(prefix, f'{names} are missing; set them, or inherit them with base = "NAME"')
            return _BROKEN

    for name in table:
        if name not in sections():
            unknown(name)
    built = {}
    for name, section in sections().items():
        values = table.get(name, {})
        if not isinstance(values, dict):
            say(name, f"{name} = {_shown(values)} must be a section: write [{name}]")
            continue
        built[name] = build(name, section, values)
    if problems:
        raise UserError("\n".join(problems))
    return Config(**built)


def _origin(name: str, origins: Mapping[str, str], source: str) -> str:
    """Origin of a field, or of the innermost table that was set as one value."""
    while name:
        if name in origins:
            return origins[name]
        name = name.rpartition(".")[0]
    return source


def _own_plugins(
    table: Mapping[str, Any], within: type = Config, prefix: str = ""
) -> Iterable[tuple[str, str, Registry]]:
    """Plug-ins given as `package.module:Class`: dotted field, name, registry."""
    for section, info in infos(within).items():
        inner, values = section_class(info.annotation), table.get(section)
        if inner is None or not isinstance(values, Mapping):
            continue
        yield from _own_plugins(values, inner, f"{prefix}{section}.")
        plugins = getattr(inner, "plugins", None)
        if plugins is None:
            continue
        name = values.get(plugins.selector)
        if isinstance(name, str) and ":" in name:
            yield f"{prefix}{section}.{plugins.selector}", name, plugins.registry


# Placeholder for a table with problems that are already reported.
_BROKEN = object()


def _unknown(name: str, fields: Mapping[str, Field]) -> str:
    """Error message for an unknown section or field."""
    head = name.rpartition(".")[0]
    what = "a field" if head else "a section or field"
    if name in RENAMED:
        return f"{name} was renamed to {RENAMED[name]}"
    if name in sections():
        return f"{name} is a section; set one of its fields: {name}.FIELD=VALUE"
    if not head and (close := difflib.get_close_matches(name, sections(), 1)):
        return f"{name} is not a section; did you mean {close[0]}?"
    if near := nearest(name, fields):
        return f"{name} is not {what}; did you mean {near}?"
    if inside := [n for n in fields if n.rpartition(".")[0] == head and head]:
        leaves = ", ".join(n.rpartition(".")[2] for n in inside)
        return f"{name} is not a field; {head} has {leaves}"
    return f"{name} is not {what}; the sections are {', '.join(sections())}"


def _not_allowed(field: Field, value: Any) -> str:
    most = ""
    if isinstance(value, int) and value > LARGEST_INT and int in field.kinds:
        most = f", at most {LARGEST_INT}" if "less than" not in field.allowed else ""
    return f"{field.name} = {_shown(value)} is not allowed: it must be {field.allowed}{most}"


def _shown(value: Any) -> str:
    """A value nearly as the user wrote it, at most 80 characters."""
    try:
        text = toml_value(value)
    except TypeError:  # a TOML date or time
        text = str(value)
    except ValueError:  # Python limits the digits of a number
        return "a number of too many digits"
    return text if len(text) <= 80 else text[:77] + "..."
