"""The command `mtraining COMMAND ...` of the installed package, also `python -m mtraining_jax`."""

import importlib
import sys
from collections.abc import Sequence

from mtraining_jax.utils.errors import UserError, print_error
from mtraining_jax.utils.invocation import command_of
from mtraining_jax.utils.text import choose_one_of, print_text
from mtraining_jax.utils.version import VERSION

# Module and summary by command; a module is imported when its command runs.
COMMANDS = {
    "train": ("cli.train", "train a model"),
    "generate": ("cli.generate", "continue prompts with a model"),
    "evaluate": ("cli.evaluate", "evaluate a model on long-context tasks"),
    "report": ("report", "write an HTML page about runs"),
    "inspect-data": ("cli.inspect_data", "show the sequences of training data"),
    "tokenize-corpus": ("cli.tokenize_corpus", "pre-tokenize training data"),
    "check-cluster": ("check_cluster", "check the hosts of a run"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; `arguments` without the program's name, None for those of this process.

    Returns the exit status of the command, 2 if it is missing or unknown.
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if name in COMMANDS:
        module = importlib.import_module(f"mtraining_jax.{COMMANDS[name][0]}")
        return module.main(rest)
    try:
        if name in ("-h", "--help"):
            return print_text(_usage())
        if name == "--version":
            return print_text(f"mtraining-jax {VERSION}\n")
        problem = f'unknown command "{name}"' if name else "no command"
        raise UserError(f"{problem}; {choose_one_of(name, COMMANDS)}; see --help")
    except UserError as error:
        return print_error(error)


def _usage() -> str:
    usage = command_of("COMMAND")
    lines = [f"  {name:<18}{summary}" for name, (_, summary) in COMMANDS.items()]
    help_of = f"Options of a command: {usage} --help. --version prints the version."
    return "\n".join([f"usage: {usage} [options]", "", *lines, "", help_of, ""])


if __name__ == "__main__":
    sys.exit(main())
