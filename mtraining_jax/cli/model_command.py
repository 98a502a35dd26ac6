"""Parts of the commands that load a model: evaluate and generate."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from mtraining_jax.cli.argument_parser import ArgumentParser
from mtraining_jax.config import fields_with
from mtraining_jax.config import help_text as fields_text
from mtraining_jax.utils.console import Output
from mtraining_jax.utils.errors import UserError, print_error
from mtraining_jax.utils.file_limits import is_url
from mtraining_jax.utils.hub import HUB
from mtraining_jax.utils.invocation import command_of
from mtraining_jax.utils.text import print_text
from mtraining_jax.utils.version import VERSION

_UNITS = {"K": 2**10, "M": 2**20}


def run_command(
    name: str,
    arguments: Sequence[str] | None,
    help_text: Callable[[], str],
    run: Callable[[list[str]], int],
) -> int:
    """Runs a command; returns its exit status, 0 for --help and --version, 2 after a user error.

    Args:
        name: as in `mtraining NAME`.
        arguments: without the program's name; None for those of this process.
        help_text: returns the text of `--help` after `usage: ` and the command.
        run: runs the command with its arguments; returns the exit status.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)

    def usage() -> str:
        return f"usage: {command_of(name)} {help_text()}"

    try:
        for number, argument in enumerate(arguments):
            option, _, section = argument.partition("=")
            if option in ("-h", "--help"):
                following = [*arguments[number + 1 :], "-"][0]
                section = section or ("" if following.startswith("-") else following)
                return print_text(_fields_of(section, arguments) if section else usage())
        if "--version" in arguments:
            return print_text(f"mtraining-jax {VERSION}\n")
        return run(arguments)
    except KeyboardInterrupt:
        return print_error(UserError("interrupted"))
    except UserError as error:
        return print_error(error)


def _fields_of(section: str, arguments: Sequence[str]) -> str:
    """Help on a section; arguments such as --data.source=text select plug-ins."""
    named = [argument[2:].partition("=") for argument in arguments if argument.startswith("--")]
    overrides = {name: value for name, equals, value in named if "." in name and equals}
    return fields_text(fields_with(None, overrides), section)


def model_parser() -> ArgumentParser:
    """Creates a parser with the options of all these commands."""
    parser = ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--model", type=checkpoint)
    parser.add_argument("--tokenizer")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--cpu-devices", type=at_least(1))
    return parser


def results_console() -> Console:
    """Creates a console, wide enough for tables in a file."""
    console = Output()
    if not console.is_terminal:
        console.width = 160
    return console


def check_required(options: argparse.Namespace, *names: str) -> None:
    """Raises UserError if an option is missing or empty."""
    for name in names:
        if not getattr(options, name):
            raise UserError(f"--{name} is missing; see --help")


def forwarded_options(rest: Sequence[str], sections: Sequence[str]) -> dict[str, str]:
    """Parses options such as --sparsity.max_verticals=512: values as text by dotted name."""
    found: dict[str, str] = {}
    left = list(rest)
    while left:
        argument = left.pop(0)
        name, equals, value = argument.removeprefix("--").partition("=")
        section, _, field = name.partition(".")
        if not argument.startswith("--") or section not in sections or not field:
            raise UserError(f"unknown option {argument}; see --help")
        if not equals:
            if not left or left[0].startswith("--"):
                raise UserError(f"--{name} needs a value: --{name}=VALUE")
            value = left.pop(0)
        found[name] = value
    return found


def at_least(smallest: int) -> Callable[[str], int]:
    """Returns a type of arguments: integers from a smallest one."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text} must be an integer of at least {smallest}")
        return int(text)

    return parse


def token_count(text: str) -> int:
    """Parses a number of tokens; 4K is 4096 and 1M is 1048576."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdecimal() or int(digits) < 1:
        what = "a positive number of tokens, such as 4096 or 4K"
        raise argparse.ArgumentTypeError(f'"{text}" must be {what}')
    return int(digits) * unit


def expanded_path(text: str) -> Path:
    """A type of arguments: local paths, with ~."""
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text} is a URL; only local paths are supported")
    return Path(text).expanduser()


def checkpoint(text: str) -> Path | str:
    """A type of arguments: local paths, with ~, and names with `hf://`."""
    return text if text.startswith(HUB) else expanded_path(text)


def output_folder(text: str) -> Path:
    """A type of arguments: a local folder, new or existing."""
    path = expanded_path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a file; it must be a folder, new or existing")
    return path
