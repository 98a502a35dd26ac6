"""The command `evaluate.py`: arguments in, results, tables and pictures out."""

import dataclasses
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from mtraining_jax.argument_parser import ArgumentParser
from mtraining_jax.errors import UserError, print_error
from mtraining_jax.evaluation.tasks import GROUPS, TASKS, Task, option_docs

_USAGE = """\
usage: evaluate.py --model FOLDER --tasks NAMES --lengths LENGTHS [options]

  --model FOLDER         folder of a run (its newest checkpoint) or a Hugging Face checkpoint
  --second-model FOLDER  another one, on the same prompts, for a comparison of the two
  --tasks NAMES          separated by commas or spaces, listed below; or one of the groups
                         {groups};
                         or your own as package.module:Name
  --lengths LENGTHS      tokens of prompt and answer, separated by commas: 4096,8K,1M
  --attention WHICH      of the prompt: dense (default), sparse, or both, side by side
  --samples N            of each task and length (default 20)
  --depths N             depths at which needles lie in turn (--task.depths)
  --seed N               of the samples (default 0)
  --sparse-answers       tokens of a given answer attend sparsely too, in one pass with the prompt,
                         as in training; otherwise they attend to all, as generated ones do
  --generate             decode answers also where one forward pass over prompt and answer decides
                         as well
  --output FOLDER        of the results (default evaluations/NAME); the same command goes on where
                         it was interrupted, and further tasks, lengths, samples join what is there
  --report FOLDER        make tables and pictures of a folder of results again, without a model
  --dtype TYPE           bfloat16 or float32, what layers compute in
  --tokenizer NAME       bytes, or a tokenizer.json, instead of the model's own
  --cpu-devices N        run on N virtual devices of the CPU
  --sparsity.FIELD=VALUE, --parallel.FIELD=VALUE
                         as of train.py: how sparse attention chooses; the mesh
  --task.OPTION=VALUE    of the tasks that have it
  --help                 print this text and stop

Tasks:"""

_UNITS = {"K": 2**10, "M": 2**20}
# Prefixes of options that are handed on.
_FORWARDED = ("sparsity", "parallel", "task")


@dataclasses.dataclass(frozen=True)
class Request:
    """What the arguments ask for.

    Attributes:
        models: folders by the label that results call them.
        tasks: names, not checked.
        lengths: tokens.
        attentions: "dense", "sparse" or both.
        samples: of each task and length.
        seed: of the samples.
        generate: decode answers also where teacher forcing decides.
        sparse_answers: given answers attend sparsely too.
        output: folder of the results.
        options: of tasks, as text.
        sparsity, parallel: fields of these sections, as text.
        dtype: what layers compute in; None leaves it to the model.
        tokenizer: "bytes" or a tokenizer.json; None is the model's own.
        cpu_devices: virtual CPU devices to run on; None takes the devices that JAX finds.
    """

    models: Mapping[str, Path]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    attentions: tuple[str, ...]
    samples: int
    seed: int
    generate: bool
    sparse_answers: bool
    output: Path
    options: Mapping[str, str]
    sparsity: Mapping[str, str]
    parallel: Mapping[str, str]
    dtype: str | None
    tokenizer: str | None
    cpu_devices: int | None


def parse(arguments: Sequence[str]) -> Request | Path:
    """Checks arguments as far as it goes without tasks and models.

    Returns:
        What to evaluate; or the folder of results to report on, where --report is given.

    Raises:
        UserError: an option that does not exist, lacks its value or has an impossible one.
    """
    parser = ArgumentParser(prog="evaluate.py", allow_abbrev=False, add_help=False)
    for name in ("model", "second-model", "output", "tokenizer", "report"):
        parser.add_argument(f"--{name}")
    for name in ("tasks", "lengths"):  # with commas, spaces or both between them
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
            raise UserError(f"--{name} is missing; --help tells more")
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
            raise UserError(f"{path} is no folder: a run's folder or a Hugging Face checkpoint is")
    if len({path.resolve() for path in models.values()}) < len(models):
        raise UserError(f"--second-model={found.second_model} is --model: give another one")
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
    """Runs the command.

    Args:
        arguments: without the program's name; None takes those of this process.

    Returns:
        The exit status: 0, or 2 after a mistake that the user can correct, reported on stderr.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160  # of tables in a file
    try:
        if {"-h", "--help"} & set(arguments):
            print(help_text(), end="")
            return 0
        request = parse(arguments)
        if isinstance(request, Path):
            from mtraining_jax.evaluation.report import write_report

            folder = request
        else:
            from mtraining_jax.evaluation.command import run
            from mtraining_jax.evaluation.report import write_report
            from mtraining_jax.platform import set_platform

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
    """What `--help` prints: the usage, the tasks, and the options of tasks."""
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


def forwarded_options(
    rest: Sequence[str], prefixes: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Options such as --sparsity.max_verticals=512, by prefix and field.

    Args:
        rest: arguments that nothing else has taken.
        prefixes: those that there may be.

    Raises:
        UserError: one that has no known prefix or no value.
    """
    found: dict[str, dict[str, str]] = {prefix: {} for prefix in prefixes}
    left = list(rest)
    while left:
        argument = left.pop(0)
        name, equals, value = argument.removeprefix("--").partition("=")
        prefix, dot, field = name.partition(".")
        if not argument.startswith("--") or prefix not in found or not dot or not field:
            raise UserError(f"{argument} is not an option; --help lists all")
        if not equals:
            if not left or left[0].startswith("--"):
                raise UserError(f"--{name} needs a value, as --{name}=VALUE")
            value = left.pop(0)
        found[prefix][field] = value
    return found


def _listed(texts: list[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def token_count(option: str, text: str) -> int:
    """A number of tokens that an option gives; 4K is 4096 and 1M is 1048576.

    Raises:
        UserError: if it is none.
    """
    unit = _UNITS.get(text[-1].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdecimal() or int(digits) < 1:
        raise UserError(f'{option} has "{text}", which must be a number of tokens, as 4096 or 4K')
    return int(digits) * unit
