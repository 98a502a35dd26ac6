"""The command `train`."""

import sys
from collections.abc import Sequence

from mtraining_jax.cli.argument_parser import config_parser, parse_with_overrides, selected_config
from mtraining_jax.config import available_configs, fields_with, help_text
from mtraining_jax.config.notes import notes
from mtraining_jax.tools.plan.hardware import GPUS
from mtraining_jax.utils.errors import DoesNotFit, UserError, print_error
from mtraining_jax.utils.invocation import command_of
from mtraining_jax.utils.jax_platform import abort_stuck_collectives, set_platform
from mtraining_jax.utils.printable import print_message
from mtraining_jax.utils.signals import EXIT_STOPPED, Stopped, StopSignals
from mtraining_jax.utils.text import print_text
from mtraining_jax.utils.version import VERSION

_USAGE = """\
usage: {command} --config NAME [--SECTION.FIELD=VALUE ...]

  --config NAME    configuration of the run: the path of a TOML file, or one of
                   {names}
  --dry-run[=MODE] predict memory, FLOP and step time without GPUs and data, then exit; exit
                   status 1 if the run does not fit. MODE: compile compiles the training step for
                   its GPU mesh, even on a machine without GPUs; estimate uses formulas; auto
                   (default) compiles if the CUDA plugin of JAX is installed
  --dry-run-gpu=GPU  GPU type for the dry run: h200 (default), h100-80gb, or, as forecasts from
                   published peak rates, {gpus}
  --print-config   print the resolved configuration as TOML and exit
  --version        print the version and exit
  --help [SECTION] print this help, or the fields of one section, and exit; the options of a
                   pattern or source are shown if it is selected:
                   --help sparsity --sparsity.kind=vertical_slash

Set fields in the TOML file under their [section], or on the command line as
--section.field=value or --section.field value. The command line wins. Write lists as in TOML:
--data.paths='["a.txt", "b.txt"]'.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; `arguments` without the program name, None for `sys.argv`.

    Returns the exit status: 1 if a dry run does not fit, 2 after a user error, 75 if a signal
    stopped the run, which the same command resumes, otherwise 0.
    """
    try:
        with StopSignals() as signals:
            return _run(sys.argv[1:] if arguments is None else arguments, signals)
    except Stopped as stopped:
        if not stopped.printed:
            print_message(f"stopped: {stopped}")
        return EXIT_STOPPED
    except UserError as error:
        return print_error(error)


def _usage() -> str:
    names, gpus = ", ".join(available_configs()), ", ".join(list(GPUS)[2:])
    return _USAGE.format(command=command_of("train"), names=names, gpus=gpus) + "\n"


def _run(arguments: Sequence[str], signals: StopSignals) -> int:
    parser = config_parser()
    modes = "auto", "compile", "estimate"
    parser.add_argument("--dry-run", nargs="?", const=modes[0], choices=modes)
    parser.add_argument("--dry-run-gpu", choices=list(GPUS))
    for name in ("print-config", "version"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parse_with_overrides(parser, arguments)
    if options.help is not None:
        usage = "" if options.help else _usage()
        fields = fields_with(options.config, options.overrides)
        return print_text(usage + help_text(fields, options.help or None))
    if options.version:
        return print_text(f"mtraining-jax {VERSION}\n")
    if options.dry_run_gpu is not None and options.dry_run is None:
        raise UserError(f"--dry-run-gpu={options.dry_run_gpu} needs --dry-run")
    config = selected_config(options)
    for sentence in notes(config, options.overrides, options.config):
        print_message(f"note: {sentence}")
    if options.print_config:
        return print_text(config.to_toml())
    if options.dry_run is not None:
        from mtraining_jax.tools.plan.dry_run import dry_run

        return dry_run(config, options.dry_run, GPUS[options.dry_run_gpu or "h200"])
    pinned_gib = None
    if config.parallel.cpu_devices is None:
        # A change would compile again, so only if the watchdog would come later.
        abort_stuck_collectives(max(3600, 2 * config.run.step_timeout_seconds))
        # Imports JAX, but starts no backend.
        from mtraining_jax.tools.plan.memory import pinned_limit

        pinned_gib = pinned_limit(config)
    set_platform(config.parallel.cpu_devices, pinned_gib)
    # Only after `set_platform`: training starts the backend.
    from mtraining_jax.trainer import run

    try:
        run(config, signals=signals)
    except DoesNotFit as error:
        from mtraining_jax.tools.plan.dry_run import ways_after

        error.args = (f"{error}; {ways_after(error, config)}",)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
