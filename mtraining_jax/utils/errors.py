"""Errors that the user can correct."""

from mtraining_jax.utils.printable import print_message


class UserError(ValueError):
    """Invalid input: names the field or file, its value and what is allowed.

    Commands print the message without a traceback and exit with status 2.
    """

    printed = False  # by process 0, for all processes of a run


class DoesNotFit(UserError):
    """A program or state that needs more memory than there is.

    `excess` are bytes of a device that a training step lacks, of the host if negative; `free` are
    all bytes that a device has for state and step. None if they are unknown.
    """

    def __init__(self, what: str, *, excess: int | None = None, free: int | None = None) -> None:
        super().__init__(what)
        self.excess, self.free = excess, free


def print_error(error: UserError) -> int:
    """Prints an error to stderr and returns the exit status, 2."""
    for line in [] if error.printed else str(error).splitlines():
        print_message(f"error: {line}")
    return 2
