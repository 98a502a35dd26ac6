"""The command line: arguments in, a checked configuration out, and then the run."""

import dataclasses
import itertools
import sys
from collections.abc import Sequence

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
from mtraining_jax.errors import UserError, print_error
from mtraining_jax.planning.hardware import GPUS
from mtraining_jax.platform import set_platform
from mtraining_jax.signals import EXIT_STOPPED, Stopped, StopSignals

_USAGE = """\
usage: train.py --config NAME [--SECTION.FIELD=VALUE ...]

  --config NAME    the run: {names}, or the path of a TOML file
  --dry-run[=MODE] print what the run would need (memory, FLOP, time of a step) and stop, without
                   its devices and data. MODE compile: compile the real step for its mesh of GPUs,
                   which need not be here; estimate: by formulas; auto (default): compile where the
                   CUDA plugin of JAX is installed. Exit status 1 if the run does not fit
  --dry-run-gpu=GPU  what GPUs a dry run is for: h200 (default), or a100-40gb, of which the times
                   are a forecast
  --print-config   print the whole configuration as TOML, after all overrides, and stop
  --help           print this text and stop

Every field below can be set in the file, under its [section], and on the command line, as
--section.field=value or --section.field value; the command line wins. Lists are TOML:
--data.paths='["a.txt", "b.txt"]'.
"""

_FLAGS = ("print-config", "help")
_DRY_RUN = "dry-run"
_DRY_RUN_MODES = ("auto", "compile", "estimate")
_DRY_RUN_GPU = "dry-run-gpu"


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """What the arguments ask for.

    Attributes:
        config: name or path of the configuration, None if not given.
        overrides: dotted field names and their values as text, in the order given.
        dry_run: how to find out what the run needs, instead of running it; None runs it.
        dry_run_gpu: name of the GPUs that a dry run is for.
        print_config: print the configuration instead of running it.
        help: print the help text instead of running.
    """

    config: str | None = None
    overrides: tuple[tuple[str, str], ...] = ()
    dry_run: str | None = None
    dry_run_gpu: str = "h200"
    print_config: bool = False
    help: bool = False


def parse_command_line(arguments: Sequence[str]) -> CommandLine:
    """Sorts arguments into the configuration's name, overrides and flags.

    A field that is true or false may stand alone, which is true. Values are not checked here.

    Raises:
        UserError: one line for each option that does not exist, lacks its value, has a value that
            it does not take, or is given twice where once is allowed.
    """
    load_own_plugins(*_named(arguments))
    fields = all_fields()
    problems: list[str] = []
    configs: list[str] = []
    overrides: list[tuple[str, str]] = []
    alone: list[str] = []
    flags: set[str] = set()
    dry_run: str | None = None
    gpu: str | None = None
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "-h":
            argument = "--help"
        if not argument.startswith("--"):
            alone.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        if name in _FLAGS:
            flags.add(name)
            if equals:
                problems.append(f"--{name} takes no value, and {argument} gives it one")
            continue
        if name == _DRY_RUN:
            dry_run = value if equals else "auto"
            if dry_run not in _DRY_RUN_MODES:
                modes = ", ".join(_DRY_RUN_MODES)
                problems.append(f"--{name}={value} is not possible; --{name} takes one of {modes}")
            continue
        if not equals:
            follows = bool(rest) and not rest[0].startswith("--")
            if follows:
                value = rest.pop(0)
            elif name in fields and bool in fields[name].kinds:
                value = "true"
            elif name in fields or name in ("config", _DRY_RUN_GPU):
                problems.append(f"--{name} needs a value, as --{name}=VALUE")
                continue
        if name == "config":
            configs.append(value)
        elif name == _DRY_RUN_GPU:
            gpu = value
            if gpu not in GPUS:
                gpus = ", ".join(GPUS)
                problems.append(f"--{name}={value} is not possible; --{name} takes one of {gpus}")
        elif name in fields:
            overrides.append((name, value))
        else:
            problems.append(_unknown_option(name))
    dashed = [text for text in alone if text.startswith("-") and _is_option(text.lstrip("-"))]
    if dashed:
        problems.append(f'"{dashed[0]}" begins with one dash; did you mean -{dashed[0]}?')
    elif alone and not configs:
        problems.append(f'"{alone[0]}" belongs to no option; did you mean --config {alone[0]}?')
    elif alone:
        problems.append(
            f'"{alone[0]}" belongs to no option; a list is one argument, as \'["a", "b"]\''
        )
    if len(configs) > 1:
        problems.append(f"--config is given {len(configs)} times: {', '.join(configs)}")
    if gpu is not None and dry_run is None:
        problems.append(f"--{_DRY_RUN_GPU}={gpu} says what --{_DRY_RUN} is for, which is not given")
    if problems:
        raise UserError("\n".join(problems))
    return CommandLine(
        config=configs[0] if configs else None,
        overrides=tuple(overrides),
        dry_run=dry_run,
        dry_run_gpu=gpu or CommandLine.dry_run_gpu,
        print_config="print-config" in flags,
        help="help" in flags,
    )


def _named(arguments: Sequence[str]) -> tuple[str | None, list[tuple[str, str]]]:
    """The configuration's name, and every option with its value, not checked."""
    options = []
    for argument, following in itertools.pairwise([*arguments, ""]):
        name, equals, value = argument[2:].partition("=")
        if argument.startswith("--") and name:
            options.append((name, value if equals else following))
    config = dict(options).get("config")
    return config, [(name, value) for name, value in options if "." in name]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: without the program's name; None takes those of this process.

    Returns:
        The exit status: 0; 1 if a dry run finds that the run does not fit; 2 after a mistake that
        the user can correct, reported on stderr; 75 if the run was stopped by a signal, and the
        same command goes on.
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
    """The same, which raises what ends it early."""
    command = parse_command_line(arguments)
    if command.help:
        print(_USAGE.format(names=", ".join(available_configs())))
        print(help_text(), end="")
        return 0
    if command.config is None:
        names = ", ".join(available_configs())
        raise UserError(
            f"--config NAME is missing: {names}, or the path of a TOML file; --help tells more"
        )
    config = load_config(command.config, command.overrides)
    given = [name for name, _ in command.overrides]
    for sentence in [*unread(config, given), *advice(config)]:
        print(f"note: {sentence}", file=sys.stderr)
    if command.print_config:
        print(config_to_toml(config), end="")
        return 0
    if command.dry_run is not None:
        from mtraining_jax.planning.dry_run import dry_run

        return dry_run(config, command.dry_run, GPUS[command.dry_run_gpu])
    set_platform(config.parallel.cpu_devices)
    # Imported only here: it imports JAX, for which the devices must be set by now.
    from mtraining_jax.training.loop import run

    run(config, signals)
    return 0


def _is_option(text: str) -> bool:
    """Whether text without its dashes, as `run.steps=3`, is an option."""
    name = text.partition("=")[0]
    return name in (*all_fields(), "config", _DRY_RUN, _DRY_RUN_GPU, *_FLAGS)


def _unknown_option(name: str) -> str:
    if name in sections():
        return f"--{name} is a section; set one of its fields, as --{name}.FIELD=VALUE"
    near = nearest(name, [*all_fields(), "config", _DRY_RUN, *_FLAGS])
    if near is None:
        return f"--{name} is not an option; --help lists all"
    return f"--{name} is not an option; did you mean --{near}?"
