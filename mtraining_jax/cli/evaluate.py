"""The command `evaluate.py`: parses arguments, and writes results, tables and pictures."""

import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mtraining_jax import __version__
from mtraining_jax.cli.argument_parser import ArgumentParser
from mtraining_jax.evaluation.request import Request
from mtraining_jax.evaluation.tasks import GROUPS, TASKS, Task, option_docs
from mtraining_jax.utils.errors import UserError, print_error
from mtraining_jax.utils.text import print_text

_USAGE = """\
usage: evaluate.py --model FOLDER --tasks NAMES --lengths LENGTHS [options]

  --model FOLDER         run folder (its newest checkpoint) or Hugging Face checkpoint
  --second-model FOLDER  another model to compare with on the same prompts
  --tasks NAMES          task names (listed below), separated by commas or spaces; or a group:
                         {groups};
                         or your own task as package.module:Name
  --lengths LENGTHS      tokens of prompt and answer together, separated by commas: 4096,8K,1M
  --attention KIND       attention of the prompt: dense (default), sparse, or both to compare them
  --samples N            samples per task and length (default 20)
  --depths N             number of needle depths (same as --task.depths)
  --seed N               random seed of the samples (default 0)
  --sparse-answers       in teacher forcing, use sparse attention for the answer too, in one pass
                         with the prompt as in training; by default answer tokens attend to all
                         earlier tokens, like generated ones
  --generate             generate answers even where teacher forcing is enough to score them
  --output FOLDER        folder of the results (default evaluations/NAME); the same command resumes
                         an interrupted evaluation, and more tasks, lengths and samples are added
  --report FOLDER        rebuild tables and pictures from a folder of results, without a model
  --dtype TYPE           compute dtype: bfloat16 or float32
  --tokenizer NAME       bytes or the path of a tokenizer.json, instead of the model's tokenizer
  --cpu-devices N        run on N virtual CPU devices
  --sparsity.FIELD=VALUE, --parallel.FIELD=VALUE
                         override the sparse pattern or the mesh, as in train.py
  --task.OPTION=VALUE    options of tasks, listed below
  --version              print the version and exit
  --help                 print this help and exit

Tasks:"""

_UNITS = {"K": 2**10, "M": 2**20}
# Prefixes of forwarded options.
_FORWARDED = ("sparsity", "parallel", "task")


def parse(arguments: Sequence[str]) -> Request | Path:
    """Parses and validates arguments, as far as possible without tasks and models.

    Returns the request, or the folder of --report.
    """
    parser = ArgumentParser(prog="evaluate.py", allow_abbrev=False, add_help=False)
    for name in ("model", "second-model", "output", "tokenizer", "report"):
        parser.add_argument(f"--{name}")
    for name in ("tasks", "lengths"):  # separated by commas, spaces or both
        parser.add_argument(f"--{name}", nargs="+", default=[])
    parser.add_argument("--attention", choices=("dense", "sparse", "both"), default="dense")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    for name, default in (("samples", 20), ("seed", 0), ("depths", None), ("cpu-devices", None)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("generate", "sparse-answers"):
        parser.add_argument(f"--{name}", action="store_true")
    found, rest = parser.parse_known_args(list(arguments))
    if found.report is not None:
        return Path(found.report).expanduser()
    forwarded = forwarded_options(rest, _FORWARDED)
    tasks, lengths = _listed(found.tasks), _listed(found.lengths)
    for name, value in (("model", found.model), ("tasks", tasks), ("lengths", lengths)):
        if not value:
            raise UserError(f"--{name} is missing; see --help")
    for name, least in (("samples", 1), ("seed", 0), ("cpu_devices", 1)):
        value = getattr(found, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')}={value} must be at least {least}")
    if found.depths is not None:
        forwarded["task"]["depths"] = str(found.depths)
    models = {"model": Path(found.model).expanduser()}
    if found.second_model:
        models["second"] = Path(found.second_model).expanduser()
    for path in models.values():
        if not path.is_dir():
            raise UserError(f"{path} is not a folder; give a run folder or Hugging Face checkpoint")
    if len({path.resolve() for path in models.values()}) < len(models):
        raise UserError(f"--second-model={found.second_model} is the same folder as --model")
    both = ("dense", "sparse")
    return Request(
        models=models,
        tasks=tuple(tasks),
        lengths=tuple(token_count("--lengths", text) for text in lengths),
        attentions=both if found.attention == "both" else (found.attention,),
        samples=found.samples,
        seed=found.seed,
        generate=found.generate,
        sparse_answers=found.sparse_answers,
        output=Path(
            found.output or Path("evaluations", models["model"].resolve().name)
        ).expanduser(),
        options=forwarded["task"],
        sparsity=forwarded["sparsity"],
        parallel=forwarded["parallel"],
        dtype=found.dtype,
        tokenizer=found.tokenizer,
        cpu_devices=found.cpu_devices,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 after a user error."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160  # for tables in a file
    try:
        if {"-h", "--help"} & set(arguments):
            return print_text(help_text())
        if "--version" in arguments:
            return print_text(f"mtraining-jax {__version__}\n")
        request = parse(arguments)
        if isinstance(request, Path):
            from mtraining_jax.evaluation.report import write_report

            folder = request
        else:
            from mtraining_jax.evaluation.command import run
            from mtraining_jax.evaluation.report import write_report
            from mtraining_jax.utils.jax_platform import set_platform

            set_platform(request.cpu_devices)
            run(request, console, command=shlex.join(["evaluate.py", *arguments]))
            folder = request.output
        for path in write_report(folder, console):
            console.print(f"wrote {path}", markup=False)
    except KeyboardInterrupt:
        print("error: interrupted before the first sample", file=sys.stderr)
        return 2
    except UserError as error:
        return print_error(error)
    return 0


def help_text() -> str:
    """Returns the text of `--help`: usage, tasks, and options of tasks."""
    lines = [_USAGE.format(groups=", ".join(GROUPS))]
    names: dict[type[Task], list[str]] = {}
    docs: dict[str, str] = {}
    for name in TASKS.names:
        names.setdefault(TASKS.get(name), []).append(name)
    for cls, own in names.items():
        lines += _wrapped(", ".join(own), 2)
        lines += _wrapped((cls.__doc__ or "").strip().splitlines()[0], 6)
        options = option_docs(cls)
        if options:
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


def forwarded_options(rest: Sequence[str], prefixes: Sequence[str]) -> dict[str, dict[str, str]]:
    """Parses options such as --sparsity.max_verticals=512, by prefix and field."""
    found: dict[str, dict[str, str]] = {prefix: {} for prefix in prefixes}
    left = list(rest)
    while left:
        argument = left.pop(0)
        name, equals, value = argument.removeprefix("--").partition("=")
        prefix, dot, field = name.partition(".")
        if not argument.startswith("--") or prefix not in found or not dot or not field:
            raise UserError(f"unknown option {argument}; see --help")
        if not equals:
            if not left or left[0].startswith("--"):
                raise UserError(f"--{name} needs a value: --{name}=VALUE")
            value = left.pop(0)
        found[prefix][field] = value
    return found


def _listed(texts: list[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def token_count(option: str, text: str) -> int:
    """Parses a number of tokens; 4K is 4096 and 1M is 1048576."""
    unit = _UNITS.get(text[-1].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdecimal() or int(digits) < 1:
        raise UserError(
            f'{option} = "{text}" must be a positive number of tokens, such as 4096 or 4K'
        )
    return int(digits) * unit
