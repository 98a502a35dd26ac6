"""Errors that the user can correct."""

import contextlib
import sys


class UserError(ValueError):
    """Invalid input: names the field or file, its value and what is allowed.

    Commands print the message without a traceback and exit with status 2.
    """

    printed = False  # by process 0, for all processes of a run


class DoesNotFit(UserError):
    """A program or state that needs `excess` bytes more than a device has."""

    def __init__(self, what: str, excess: int) -> None:
        super().__init__(f"{what}; run the same command with --dry-run to see what reduces it")
        self.excess = excess


def print_error(error: UserError) -> int:
    """Prints an error to stderr and returns the exit status, 2."""
    with contextlib.suppress(OSError):  # a full disk
        for line in [] if error.printed else str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
    return 2
