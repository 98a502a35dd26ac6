"""The parser of our commands' arguments: a mistake is an exception, not the end of the process."""

import argparse
from typing import NoReturn

from mtraining_jax.errors import UserError


class ArgumentParser(argparse.ArgumentParser):
    """As argparse's own, but raises a UserError that points to --help."""

    def error(self, message: str) -> NoReturn:
        """Raises a UserError with the message."""
        raise UserError(f"{message}; --help tells more")
