"""Checks a cluster before a run: `srun python -m mtraining_jax.check_cluster --config NAME`."""

import sys
from collections.abc import Sequence

from mtraining_jax.cli.argument_parser import config_parser, parse_with_overrides, selected_config
from mtraining_jax.cli.model_command import run_command
from mtraining_jax.utils.invocation import command_of
from mtraining_jax.utils.jax_platform import abort_stuck_collectives, set_platform

_USAGE = """\
--config NAME [--SECTION.FIELD=VALUE ...]

Checks the hosts of a run in about a minute. Start it as the run, with the same options:

  srun {command} --config qwen3b_512k --parallel.nodes=4

Measures matrix products and copies of each device, and links between devices and nodes. Compares
versions, variables, clocks, free memory and open-file limits, and what each process sees of
run.output_dir and the data. Prints a row for each process, with the rates of its slowest
device or link, and a sentence for each problem.

Exit status: 0 without problems, 1 with problems, 2 if the processes cannot connect or an option is
wrong, 75 if a process is lost.

  --config NAME    configuration of the run, as in training
  --help [SECTION] print this help, or the fields of one section, and exit
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    return run_command("check_cluster", arguments, _usage, _run)


def _usage() -> str:
    return _USAGE.format(command=command_of("check_cluster"))


def _run(arguments: list[str]) -> int:
    options = parse_with_overrides(config_parser(), arguments)
    config = selected_config(options)
    set_platform(config.parallel.cpu_devices)
    if config.parallel.cpu_devices is None:
        abort_stuck_collectives(300)
    # Imports JAX, so only after `set_platform`.
    from mtraining_jax.tools.cluster.check import check

    return check(config)


if __name__ == "__main__":
    sys.exit(main())
