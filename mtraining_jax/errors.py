"""Errors that a user can correct."""

import sys


class UserError(ValueError):
    """Bad input: one sentence that names the field or file, its value and what is allowed.

    The command line prints the message alone, without a traceback, and exits with status 2.
    """


def print_error(error: UserError) -> int:
    """Prints an error on stderr, as every command does; returns the exit status, 2."""
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr)
    return 2
