"""Console output of commands."""

import sys

from rich.console import Console

from mtraining_jax.utils.signals import redirect_to_devnull


class Output(Console):
    """A console without colors that stays silent, instead of exiting, once its pipe is closed."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(highlight=False, soft_wrap=True, quiet=quiet)

    def on_broken_pipe(self) -> None:
        """Continues, as with `| head`."""
        self.quiet = True
        redirect_to_devnull(sys.stdout.fileno())
        try:
            print("note: the output is closed; the command continues", file=sys.stderr, flush=True)
        except OSError:  # the same pipe, as with `2>&1 | head`
            redirect_to_devnull(sys.stderr.fileno())
