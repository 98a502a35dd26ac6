"""Plural forms, and printing of long texts."""

import os
import shlex
import sys
from collections.abc import Collection, Iterable

from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.signals import redirect_to_devnull


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`, `3 processes`."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def short_power(number: int) -> str:
    """A power of two: 512 as 512, 1024 as 1K, 2^20 as 1M."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if number >= size:
            return f"{number // size}{unit}"
    return str(number)


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` around `value` as text: `1536 or 2048`."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def command_with(options: Iterable[str], without: Collection[str] = ()) -> str:
    """The command of this process with other options, and without some.

    Args:
        options: as `--section.field=value`; they replace those of the same name.
        without: names of options, with dashes.
    """
    options = list(options)
    names = {option.partition("=")[0] for option in options}.union(without)
    kept, rest = [], list(sys.argv)
    while rest:
        argument = rest.pop(0)
        if argument.partition("=")[0] not in names:
            kept.append(argument)
        elif "=" not in argument and rest and not rest[0].startswith("--"):
            rest.pop(0)  # its value
    program = "uv run" if "UV" in os.environ else "python"
    if "SLURM_STEP_NODELIST" in os.environ and os.environ.get("SLURM_NTASKS") != "1":
        program = f"srun {program}"
    return f"{program} {shlex.join([*kept, *options])}"


def print_text(text: str) -> int:
    """Prints text to stdout, for `--help` and similar options, and returns the exit status, 0.

    Raises:
        UserError: stdout cannot be written, e.g. to a full disk. A closed pipe is not an error.
    """
    try:
        print(text, end="", flush=True)
    except OSError as error:
        redirect_to_devnull(1)  # Python flushes its buffer again at exit
        if not isinstance(error, BrokenPipeError):
            raise UserError(f"the output cannot be written ({error.strerror})") from error
    return 0
