"""Parsing of command lines: errors as exceptions, and fields of the configuration as options."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from mtraining_jax.config import Config, available_configs
from mtraining_jax.config.help import all_fields, nearest
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import shortened


class ArgumentParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` with errors as `UserError` instead of exiting the process."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{shortened(message, 200)}; see --help")

    @property
    def names(self) -> list[str]:
        """Names of the options and of all fields, without dashes."""
        options = [name.lstrip("-") for action in self._actions for name in action.option_strings]
        return [*all_fields(), *options]


def config_parser() -> ArgumentParser:
    """A parser with the options of all commands that read a configuration."""
    parser = ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("--help", nargs="?", const="")
    return parser


def parse_with_overrides(parser: ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parses arguments, with the fields of a configuration as `--section.field=value`.

    The result also has these `overrides`, which `Config.load` validates. Raises UserError with a
    line per unknown option or misplaced argument.
    """
    options, rest = parser.parse_known_args([x if x != "-h" else "--help" for x in arguments])
    overrides, positional, problems = {}, [], []
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument[2:].partition("=")
        if not argument.startswith("--"):
            positional.append(argument)
            continue
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else ...
        if "." in name:
            overrides[name] = value
        else:
            problems.append(_unknown_option(name, parser.names))
    if positional:
        problems.append(_misplaced(positional[0], parser.names, bool(options.config)))
    if len(options.config) > 1:
        names = ", ".join(options.config)
        way = 'give one; a file inherits from another one with base = "NAME"'
        problems.append(f"--config is given {len(options.config)} times: {names}; {way}")
    if problems:
        raise UserError("\n".join(problems))
    options.config = options.config[0] if options.config else None
    options.overrides = overrides
    return options


def selected_config(options: argparse.Namespace) -> Config:
    """Loads the configuration of `--config` with its overrides."""
    if options.config is None:
        names = ", ".join(available_configs())
        raise UserError(
            f"--config NAME is missing; choose one of {names} or pass the path of a TOML file; "
            "see --help"
        )
    return Config.load(options.config, options.overrides)


def _misplaced(text: str, names: Sequence[str], has_config: bool) -> str:
    if text.startswith("-") and text.lstrip("-").partition("=")[0] in names:
        return f'"{text}" begins with one dash; did you mean -{text}?'
    if not has_config:
        return f'unexpected argument "{text}"; did you mean --config {text}?'
    return f'unexpected argument "{text}"; quote a list as one: \'["a", "b"]\''


def _unknown_option(name: str, names: Sequence[str]) -> str:
    if any(known.startswith(f"{name}.") for known in names):
        return f"--{name} is a section; set one of its fields: --{name}.FIELD=VALUE"
    near = nearest(name, names)
    hint = "--help lists all options" if near is None else f"did you mean --{near}?"
    return f"unknown option --{name}; {hint}"
