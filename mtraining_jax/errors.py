"""Errors that a user can correct."""


class UserError(ValueError):
    """Bad input: one sentence that names the field or file, its value and what is allowed.

    The command line prints the message alone, without a traceback, and exits with status 2.
    """
