"""The command `generate.py`: a prompt in, new text out as it comes."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mtraining_jax.argument_parser import ArgumentParser
from mtraining_jax.errors import UserError, print_error
from mtraining_jax.platform import set_platform

_USAGE = """\
usage: generate.py --model FOLDER (--prompt TEXT | --prompt-file FILE) [options]

  --model FOLDER        folder of a run (its newest checkpoint) or a Hugging Face checkpoint
  --prompt TEXT         what is continued; no template of a chat is added to it
  --prompt-file FILE    the same from a file of UTF-8 text; - is the standard input
  --max-new-tokens N    most new tokens (default 256)
  --temperature T       0 (default) always takes the most likely token
  --top-p P             draw from the most likely tokens with probability P together (default 1)
  --seed N              of the drawing (default 0)
  --stop TEXT           end before this text; may be given several times
  --attention WHICH     of the prompt: dense (default) or sparse; new tokens attend to all
  --dtype TYPE          bfloat16 or float32, what layers compute in
  --tokenizer NAME      bytes, or a tokenizer.json, instead of the model's own
  --cpu-devices N       run on N virtual devices of the CPU
  --sparsity.FIELD=VALUE, --parallel.FIELD=VALUE, --model.FIELD=VALUE
                        as of train.py: how sparse attention chooses; the mesh; the model
  --help                print this text and stop

The new text goes to the standard output, what else there is to say to the standard error.
"""

_SECTIONS = ("sparsity", "parallel", "model")
# Which dense attention reads too.
_BLOCK_SIZE = "sparsity.block_size"
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: without the program's name; None takes those of this process.

    Returns:
        The exit status: 0; 2 after a mistake that the user can correct, reported on stderr; 130
        if interrupted.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if {"-h", "--help"} & set(arguments):
            print(_USAGE, end="")
            return 0
        _run(arguments)
    except UserError as error:
        return print_error(error)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _INTERRUPTED
    return 0


def _run(arguments: Sequence[str]) -> None:
    parser = ArgumentParser(prog="generate.py", allow_abbrev=False, add_help=False)
    for name in ("model", "prompt", "prompt-file", "tokenizer"):
        parser.add_argument(f"--{name}")
    for name, kind, default in (
        ("max-new-tokens", int, 256), ("temperature", float, 0.0), ("top-p", float, 1.0),
        ("seed", int, 0), ("cpu-devices", int, None),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--stop", action="append", default=[])
    parser.add_argument("--attention", choices=("dense", "sparse"), default="dense")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    found, rest = parser.parse_known_args(list(arguments))
    overrides = [_override(argument) for argument in rest]
    if found.model is None:
        raise UserError("--model is missing; --help tells more")
    if found.cpu_devices is not None and found.cpu_devices < 1:
        raise UserError(f"--cpu-devices={found.cpu_devices} must be at least 1")
    if found.top_p != 1 and found.temperature == 0:
        raise UserError(
            f"--top-p={found.top_p:g} has no effect with --temperature=0, which takes the most "
            "likely token; --temperature=1 would draw"
        )
    of_sparse = [name for name, _ in overrides if name.startswith("sparsity.")]
    if found.attention == "dense" and (unread := set(of_sparse) - {_BLOCK_SIZE}):
        raise UserError(
            f"--{min(unread)} has no effect with --attention=dense; --attention=sparse reads it"
        )
    prompt = _prompt(found.prompt, found.prompt_file)
    set_platform(found.cpu_devices)
    # Imported only here: they import JAX, for which the devices must be set by now.
    from mtraining_jax.evaluation.decode.sampling import GenerateOptions
    from mtraining_jax.evaluation.engine import Engine
    from mtraining_jax.evaluation.generate import generate

    options = GenerateOptions(
        found.max_new_tokens, found.temperature, found.top_p, found.seed, tuple(found.stop)
    )
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with console.status(f"loading {found.model} ...") as status:
        engine = Engine.load(
            found.model, attention=found.attention, overrides=overrides, dtype=found.dtype,
            tokenizer=found.tokenizer,
        )  # fmt: skip
        if engine.tokenizer is None:
            raise UserError(
                f"{engine.loaded.source} has no tokenizer; name one, as "
                "--tokenizer=PATH/tokenizer.json or --tokenizer=bytes"
            )
        if found.attention == "dense" and (note := engine.loaded.note_on_dense_use()) is not None:
            console.print(note, markup=False)
        status.update("compiling, and reading the prompt ...")

        def say(text: str) -> None:
            status.stop()
            print(text, end="", flush=True)

        result = generate(engine, prompt, options, on_text=say)
    print(flush=True)
    new = len(result.tokens)
    rate = f", {new / result.decode_seconds:.1f} a second" if new > 1 else ""
    console.print(
        f"prompt read in {result.prefill_seconds:.2f} s at density {result.density:.3f}; {new} new"
        f" tokens in {result.decode_seconds:.2f} s{rate}; ended by {_ENDS[result.stopped]}"
    )


_ENDS = {
    "end": "the model", "stop": "a stop text", "length": "the number of tokens asked for",
}  # fmt: skip


def _override(argument: str) -> tuple[str, str]:
    """--SECTION.FIELD=VALUE as a field and its value.

    Raises:
        UserError: if it is something else.
    """
    name, equals, value = argument.removeprefix("--").partition("=")
    known = argument.startswith("--") and name.partition(".")[0] in _SECTIONS and "." in name
    if not known:
        raise UserError(f"{argument} is not an option; --help lists all")
    if not equals:
        raise UserError(f"--{name} needs a value, as --{name}=VALUE")
    return name, value


def _prompt(text: str | None, file: str | None) -> str:
    if (text is None) == (file is None):
        raise UserError("one of --prompt and --prompt-file is needed; --help tells more")
    if text is None:
        try:
            raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
            text = raw.decode("utf-8")
        except OSError as error:
            raise UserError(f"--prompt-file={file} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UserError(
                f"--prompt-file={file} is not UTF-8 text: byte {error.start} is not"
            ) from error
    if not text:
        raise UserError("the prompt is empty: at least one token is needed to go on from")
    return text
