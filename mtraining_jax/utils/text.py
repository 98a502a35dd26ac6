"""Plural forms, and printing of long texts."""

import difflib
from collections.abc import Iterable

from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.printable import printable
from mtraining_jax.utils.signals import redirect_to_devnull


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`, `3 processes`, `2 batches`."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


def with_unit(number: int) -> str:
    """A large number in short: `427.3 K`, `3.1 B`."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


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


def print_text(text: str) -> int:
    """Prints text to stdout, for `--help` and similar options, and returns the exit status, 0.

    Raises:
        UserError: stdout cannot be written, e.g. to a full disk. A closed pipe is not an error.
    """
    try:
        print(printable(text), end="", flush=True)
    except OSError as error:
        redirect_to_devnull(1)  # Python flushes its buffer again at exit
        if not isinstance(error, BrokenPipeError):
            raise UserError(f"the output cannot be written ({error.strerror})") from error
    return 0


def did_you_mean(name: str, names: Iterable[str]) -> str | None:
    """`did you mean "NAME"?`, with the name that is most similar to an unknown one, if any."""
    close = difflib.get_close_matches(name, list(names), 1, cutoff=0.6)
    return f'did you mean "{close[0]}"?' if close else None


def choose_one_of(name: str, names: Iterable[str], similar: Iterable[str] = ()) -> str:
    """The end of an error message about an unknown name: a similar one, and all names.

    Args:
        name: the unknown name.
        names: all names, which are listed.
        similar: other valid names, which are only suggested.
    """
    names = list(names)
    hint = did_you_mean(name, [*names, *similar])
    return f"{f'{hint} Choose' if hint else 'choose'} one of {', '.join(names)}"
