"""Console output of commands."""

import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from mtraining_jax.utils.printable import printable
from mtraining_jax.utils.signals import redirect_to_devnull


class Output(Console):
    """A console without colors and markup, which escapes control characters.

    It stays silent, instead of exiting, once its pipe is closed.
    """

    def __init__(self, quiet: bool = False, stderr: bool = False) -> None:
        super().__init__(highlight=False, markup=False, soft_wrap=True, quiet=quiet, stderr=stderr)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        """Continues, as with `| head`."""
        self.quiet = True
        redirect_to_devnull(self.file.fileno())
        try:
            print("note: the output is closed; the command continues", file=sys.stderr, flush=True)
        except OSError:  # the same pipe, as with `2>&1 | head`
            redirect_to_devnull(sys.stderr.fileno())
