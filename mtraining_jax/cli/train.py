"""Command line of the trainer."""

import dataclasses
import itertools
import sys
from collections.abc import Sequence

from mtraining_jax import __version__
from mtraining_jax.config import (
    available_configs,
    config_to_toml,
    help_text,
    load_config,
    load_own_plugins,
)
from mtraining_jax.config.advice import advice
from mtraining_jax.config.fields import all_fields, nearest, sections
from mtraining_jax.config.unread import unread
from mtraining_jax.planning.hardware import GPUS
from mtraining_jax.utils.errors import UserError, print_error
from mtraining_jax.utils.jax_platform import set_platform
from mtraining_jax.utils.signals import EXIT_STOPPED, Stopped, StopSignals
from mtraining_jax.utils.text import print_text

_USAGE = """\
usage: train.py --config NAME [--SECTION.FIELD=VALUE ...]

  --config NAME    configuration of the run: the path of a TOML file, or one of
                   {names}
  --dry-run[=MODE] predict memory, FLOP and step time without GPUs and data, then exit; exit
                   status 1 if the run does not fit. MODE: compile compiles the training step for
                   its GPU mesh, even on a machine without GPUs; estimate uses formulas; auto
                   (default) compiles if the CUDA plugin of JAX is installed
  --dry-run-gpu=GPU  GPU type for the dry run: h200 (default) or a100-40gb (its times are not
                   based on measurements)
  --print-config   print the resolved configuration as TOML and exit
  --version        print the version and exit
  --help           print this help and exit

Set fields in the TOML file under their [section], or on the command line as
--section.field=value or --section.field value. The command line wins. Write lists as in TOML:
--data.paths='["a.txt", "b.txt"]'.
"""

_FLAGS = ("print-config", "version", "help")
_DRY_RUN = "dry-run"
_DRY_RUN_MODES = ("auto", "compile", "estimate")
_DRY_RUN_GPU = "dry-run-gpu"


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """Parsed arguments; `overrides` are pairs of dotted field name and value as text, in order."""

    config: str | None = None
    overrides: tuple[tuple[str, str], ...] = ()
    dry_run: str | None = None
    dry_run_gpu: str = "h200"
    print_config: bool = False
    version: bool = False
    help: bool = False


def parse_command_line(arguments: Sequence[str]) -> CommandLine:
    """Parses arguments without validating field values; a boolean field without value is true.

    Raises:
        UserError: one line per unknown option, missing or invalid value, or repeated option.
    """
    load_own_plugins(*_named(arguments))
    fields = all_fields()
    problems: list[str] = []
    configs: list[str] = []
    overrides: list[tuple[str, str]] = []
    positional: list[str] = []
    flags: set[str] = set()
    dry_run: str | None = None
    gpu: str | None = None
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "-h":
            argument = "--help"
        if not argument.startswith("--"):
            positional.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        if name in _FLAGS:
            flags.add(name)
            if equals:
                problems.append(f"--{name} takes no value: remove ={value}")
            continue
        if name == _DRY_RUN:
            dry_run = value if equals else "auto"
            if dry_run not in _DRY_RUN_MODES:
                modes = ", ".join(_DRY_RUN_MODES)
                problems.append(f'unknown mode "{value}" of --{name}; choose one of {modes}')
            continue
        if not equals:
            follows = bool(rest) and not rest[0].startswith("--")
            if follows:
                value = rest.pop(0)
            elif name in fields and bool in fields[name].kinds:
                value = "true"
            elif name in fields or name in ("config", _DRY_RUN_GPU):
                problems.append(f"--{name} needs a value: --{name}=VALUE")
                continue
        if name == "config":
            configs.append(value)
        elif name == _DRY_RUN_GPU:
            gpu = value
            if gpu not in GPUS:
                gpus = ", ".join(GPUS)
                problems.append(f'unknown GPU "{value}" of --{name}; choose one of {gpus}')
        elif name in fields:
            overrides.append((name, value))
        else:
            problems.append(_unknown_option(name))
    dashed = [text for text in positional if text[0:1] == "-" and _is_option(text.lstrip("-"))]
    if dashed:
        problems.append(f'"{dashed[0]}" begins with one dash; did you mean -{dashed[0]}?')
    elif positional and not configs:
        first = positional[0]
        problems.append(f'unexpected argument "{first}"; did you mean --config {first}?')
    elif positional:
        problems.append(
            f'unexpected argument "{positional[0]}"; quote a list as one: \'["a", "b"]\''
        )
    if len(configs) > 1:
        problems.append(f"--config is given {len(configs)} times: {', '.join(configs)}")
    if gpu is not None and dry_run is None:
        problems.append(f"--{_DRY_RUN_GPU}={gpu} needs --{_DRY_RUN}")
    if problems:
        raise UserError("\n".join(problems))
    return CommandLine(
        config=configs[0] if configs else None,
        overrides=tuple(overrides),
        dry_run=dry_run,
        dry_run_gpu=gpu or CommandLine.dry_run_gpu,
        print_config="print-config" in flags,
        version="version" in flags,
        help="help" in flags,
    )


def _named(arguments: Sequence[str]) -> tuple[str | None, list[tuple[str, str]]]:
    """The configuration's name and all dotted options with their values, unchecked."""
    options = []
    for argument, following in itertools.pairwise([*arguments, ""]):
        name, equals, value = argument[2:].partition("=")
        if argument.startswith("--") and name:
            options.append((name, value if equals else following))
    config = dict(options).get("config")
    return config, [(name, value) for name, value in options if "." in name]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; `arguments` without the program name, None for `sys.argv`.

    Returns:
        Exit status: 0 on success; 1 if a dry run does not fit; 2 after a user error, printed to
        stderr; 75 if a signal stopped the run, which the same command resumes.
    """
    try:
        with StopSignals() as signals:
            return _command(sys.argv[1:] if arguments is None else arguments, signals)
    except Stopped as stopped:
        print(f"stopped: {stopped}", file=sys.stderr)
        return EXIT_STOPPED
    except UserError as error:
        return print_error(error)


def _command(arguments: Sequence[str], signals: StopSignals) -> int:
    command = parse_command_line(arguments)
    if command.help:
        usage = _USAGE.format(names=", ".join(available_configs()))
        return print_text(f"{usage}\n{help_text()}")
    if command.version:
        return print_text(f"mtraining-jax {__version__}\n")
    if command.config is None:
        names = ", ".join(available_configs())
        raise UserError(
            f"--config NAME is missing; choose one of {names} or pass the path of a TOML file; "
            "see --help"
        )
    config = load_config(command.config, command.overrides)
    given = [name for name, _ in command.overrides]
    for sentence in [*unread(config, given), *advice(config)]:
        print(f"note: {sentence}", file=sys.stderr)
    if command.print_config:
        return print_text(config_to_toml(config))
    if command.dry_run is not None:
        from mtraining_jax.planning.dry_run import dry_run

        return dry_run(config, command.dry_run, GPUS[command.dry_run_gpu])
    set_platform(config.parallel.cpu_devices)
    # Imports JAX, so only after `set_platform`.
    from mtraining_jax.training.loop import run

    run(config, signals)
    return 0


def _is_option(text: str) -> bool:
    """Whether text without leading dashes, e.g. `run.steps=3`, is an option."""
    name = text.partition("=")[0]
    return name in (*all_fields(), "config", _DRY_RUN, _DRY_RUN_GPU, *_FLAGS)


def _unknown_option(name: str) -> str:
    if name in sections():
        return f"--{name} is a section; set one of its fields: --{name}.FIELD=VALUE"
    near = nearest(name, [*all_fields(), "config", _DRY_RUN, *_FLAGS])
    if near is None:
        return f"unknown option --{name}; --help lists all options"
    return f"unknown option --{name}; did you mean --{near}?"
