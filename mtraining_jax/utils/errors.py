"""Errors that the user can correct."""

import sys


class UserError(ValueError):
    """Invalid input: names the field or file, its value and what is allowed.

    Commands print the message without a traceback and exit with status 2.
    """

    printed = False  # by process 0, for all processes of a run


def print_error(error: UserError) -> int:
    """Prints an error to stderr and returns the exit status, 2."""
    for line in [] if error.printed else str(error).splitlines():
        print(f"error: {line}", file=sys.stderr)
    return 2
