"""An argument parser that raises an exception instead of exiting the process."""

import argparse
from typing import NoReturn

from mtraining_jax.utils.errors import UserError


class ArgumentParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` with errors as `UserError`."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")
