"""The command `evaluate`: parses arguments, and writes results, tables and pictures."""

import argparse
import itertools
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from mtraining_jax.cli.model_command import (
    at_least,
    check_required,
    checkpoint,
    expanded_path,
    forwarded_options,
    model_parser,
    output_folder,
    results_console,
    run_command,
    token_count,
)
from mtraining_jax.tools.evaluate.engine.options import AnswerKind
from mtraining_jax.tools.evaluate.tasks import GROUPS, TASKS, option_docs
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.invocation import command_of
from mtraining_jax.utils.jax_platform import set_platform

_USAGE = """\
--model FOLDER --tasks NAMES --lengths LENGTHS [options]

  --model FOLDER         run folder, Hugging Face checkpoint or adapters, or hf://OWNER/NAME
  --second-model FOLDER  another model to compare with on the same prompts
  --tasks NAMES          task names (listed below), separated by commas or spaces; or a group:
                         {groups};
                         or your own task as package.module:Name
  --lengths LENGTHS      tokens of prompt and answer together, separated by commas: 4096,8K,1M
  --attention KIND       attention of the prompt: dense (default), sparse, or both to compare them
  --samples N            samples per task and length (default 20)
  --depths N             number of needle depths (same as --task.depths)
  --seed N               random seed of the samples (default 0)
  --answers KIND         what tokens of an answer attend to after a sparse prompt: sparse (blocks
                         that each selects; the default for patterns that do), dense (all earlier
                         tokens), or one-pass (in teacher forcing, prompt and answer are read in
                         one sparse pass, as in training)
  --generate             generate answers even where teacher forcing is enough to score them
  --output FOLDER        folder of the results (default evaluations/NAME); the same command resumes
                         an interrupted evaluation, and more tasks, lengths and samples are added
  --report FOLDER        rebuild tables and pictures from a folder of results, without a model
  --dtype TYPE           compute dtype: bfloat16 or float32
  --tokenizer NAME       bytes or the path of a tokenizer.json, instead of the model's tokenizer
  --cpu-devices N        run on N virtual CPU devices
  --sparsity.FIELD=VALUE, --parallel.FIELD=VALUE, --model.FIELD=VALUE
                         override the sparse pattern, the mesh or the model, as in training
  --task.OPTION=VALUE    options of tasks, listed below
  --version              print the version and exit
  --help [SECTION]       print this help, or the fields of a section, and exit

Tasks:"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses and validates arguments, as far as possible without tasks and models.

    Returns the options, with `models` by label, `attentions`, `options` of tasks, and `overrides`
    of the configuration; with --report only that one counts.
    """
    parser = model_parser()
    parser.add_argument("--second-model", type=checkpoint)
    parser.add_argument("--report", type=expanded_path)
    parser.add_argument("--output", type=output_folder)
    # Separated by commas, spaces or both.
    parser.add_argument("--tasks", nargs="+", type=_listed, default=[])
    parser.add_argument("--lengths", nargs="+", type=_lengths, default=[])
    parser.add_argument("--attention", choices=("dense", "sparse", "both"), default="dense")
    for name, smallest, default in (("samples", 1, 20), ("seed", 0, 0), ("depths", 1, None)):
        parser.add_argument(f"--{name}", type=at_least(smallest), default=default)
    parser.add_argument("--generate", action="store_true")
    parser.add_argument("--answers", choices=get_args(AnswerKind))
    found, rest = parser.parse_known_args(arguments)
    if found.report is not None:
        return found
    forwarded = forwarded_options(rest, ("sparsity", "parallel", "model", "task"))
    found.tasks, found.lengths = (
        list(itertools.chain(*parts)) for parts in (found.tasks, found.lengths)
    )
    check_required(found, "model", "tasks", "lengths")
    found.models = {"model": found.model}
    if found.second_model:
        found.models["second"] = found.second_model
    for path in found.models.values():
        if isinstance(path, Path) and not path.is_dir():
            raise UserError(f"{path} is not a folder; give a run folder or Hugging Face checkpoint")
    if len({Path(path).resolve() for path in found.models.values()}) < len(found.models):
        raise UserError(f"--second-model={found.second_model} is the same folder as --model")
    found.attentions = ("dense", "sparse") if found.attention == "both" else (found.attention,)
    found.output = found.output or Path("evaluations", Path(found.model).resolve().name)
    found.options = {
        name.removeprefix("task."): value
        for name, value in forwarded.items()
        if name.startswith("task.")
    }
    if found.depths is not None:
        found.options["depths"] = str(found.depths)
    found.overrides = {x: forwarded[x] for x in forwarded if not x.startswith("task.")}
    return found


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _lengths(text: str) -> list[int]:
    return [token_count(part) for part in _listed(text)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 after a user error."""
    return run_command("evaluate", arguments, help_text, _run)


def _run(arguments: list[str]) -> int:
    console, request = results_console(), parse(arguments)
    # Imported here: evaluation.command imports JAX, and the report matplotlib.
    from mtraining_jax.tools.evaluate.report import write_report

    if request.report is None:
        from mtraining_jax.tools.evaluate.command import run

        set_platform(request.cpu_devices)
        run(request, console, command=f"{command_of('evaluate')} {shlex.join(arguments)}")
    for path in write_report(request.report or request.output, console):
        console.print(f"wrote {path}")
    return 0


def help_text() -> str:
    """Returns the text of `--help` after the command: usage, tasks, and options of tasks."""
    lines = [_USAGE.format(groups=", ".join(GROUPS))]
    docs: dict[str, str] = {}
    for cls, names in itertools.groupby(TASKS.names, TASKS.get):
        lines += _wrapped(", ".join(names), 2)
        lines += _wrapped((cls.__doc__ or "").strip().splitlines()[0], 6)
        if options := option_docs(cls):
            lines += _wrapped(f"Options: {', '.join(options)}", 6)
        docs |= options
    lines += ["", "Options of tasks:"]
    for option, doc in docs.items():
        lines += [f"  --task.{option}", *_wrapped(doc, 6)]
    return "\n".join(lines) + "\n"


def _wrapped(text: str, indent: int) -> list[str]:
    spaces = " " * indent
    return textwrap.wrap(
        text, 100, initial_indent=spaces, subsequent_indent=spaces, break_on_hyphens=False
    )


if __name__ == "__main__":
    sys.exit(main())
