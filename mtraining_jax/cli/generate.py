"""The command `generate.py`: continues a prompt and streams the new text."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mtraining_jax.cli.model_command import (
    check_required,
    forwarded_options,
    model_parser,
    run_command,
)
from mtraining_jax.evaluation.engine.options import GenerateOptions
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.jax_platform import set_platform

_USAGE = """\
usage: generate.py --model FOLDER (--prompt TEXT | --prompt-file FILE) [options]

  --model FOLDER        run folder (its newest checkpoint) or Hugging Face checkpoint
  --prompt TEXT         text to continue; no chat template is applied
  --prompt-file FILE    read the prompt from a UTF-8 text file; - reads standard input
  --max-new-tokens N    maximum number of new tokens (default 256)
  --temperature T       sampling temperature; 0 (default) is greedy decoding
  --top-p P             nucleus sampling: sample from the most likely tokens with total
                        probability P (default 1)
  --seed N              random seed of sampling (default 0)
  --stop TEXT           stop before this text; may be given several times
  --attention KIND      attention of the prompt: dense (default) or sparse; new tokens attend to
                        all earlier tokens
  --dtype TYPE          compute dtype: bfloat16 or float32
  --tokenizer NAME      bytes or the path of a tokenizer.json, instead of the model's tokenizer
  --cpu-devices N       run on N virtual CPU devices
  --sparsity.FIELD=VALUE, --parallel.FIELD=VALUE, --model.FIELD=VALUE
                        override the sparse pattern, the mesh or the model, as in train.py
  --version             print the version and exit
  --help [SECTION]      print this help, or the fields of a section, and exit

New text goes to standard output, all other messages to standard error.
"""

_NUMBERS = ("max_new_tokens", "temperature", "top_p", "seed")
_INTERRUPTED = 130
_ENDS = {"end": "the end token", "stop": "a stop text", "length": "--max-new-tokens"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 2 after a user error, or 130 if interrupted."""
    return run_command(arguments, lambda: _USAGE, _run)


def _run(arguments: list[str]) -> int:
    parser = model_parser("generate.py")
    for name in ("prompt", "prompt-file"):
        parser.add_argument(f"--{name}")
    for name in _NUMBERS:
        default = getattr(GenerateOptions, name)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default)
    parser.add_argument("--stop", action="append", default=[])
    parser.add_argument("--attention", choices=("dense", "sparse"), default="dense")
    found, rest = parser.parse_known_args(arguments)
    overrides = forwarded_options(rest, ("sparsity", "parallel", "model"))
    check_required(found, "model")
    if found.top_p != 1 and found.temperature == 0:
        raise UserError(
            f"--top-p={found.top_p:g} has no effect with --temperature=0 (greedy decoding); set "
            "--temperature=1 to sample"
        )
    # Dense attention has a block size too.
    of_sparse = {x for x in overrides if x.startswith("sparsity.")} - {"sparsity.block_size"}
    if found.attention == "dense" and of_sparse:
        raise UserError(
            f"--{min(of_sparse)} has no effect with --attention=dense; add --attention=sparse"
        )
    numbers = {name: getattr(found, name) for name in _NUMBERS}
    options = GenerateOptions(**numbers, stop=tuple(found.stop))
    prompt = _prompt(found.prompt, found.prompt_file)
    set_platform(found.cpu_devices)
    # Imported here, because it imports JAX, which reads the number of devices when it starts.
    from mtraining_jax.evaluation.engine.engine import Engine

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        with console.status(f"loading {found.model} ...") as status:
            how = {name: getattr(found, name) for name in ("attention", "dtype", "tokenizer")}
            engine = Engine.load(found.model, overrides=list(overrides.items()), **how)
            ids = engine.loaded.needed_tokenizer().encode_prompt(prompt)
            note = engine.loaded.note_on_dense_use()
            if found.attention == "dense" and note is not None:
                console.print(note, markup=False)
            status.update("compiling and reading the prompt ...")

            def write(text: str) -> None:
                status.stop()
                print(text, end="", flush=True)

            result = engine.generate(ids, options, on_text=write)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _INTERRUPTED
    print(flush=True)
    new = len(result.tokens)
    rate = f" ({new / result.decode_seconds:.1f} tokens/s)" if new > 1 else ""
    console.print(
        f"prompt read in {result.prefill_seconds:.2f} s at density {result.density:.3f}; {new} new"
        f" tokens in {result.decode_seconds:.2f} s{rate}; stopped by {_ENDS[result.stopped]}"
    )
    return 0


def _prompt(text: str | None, file: str | None) -> str:
    if (text is None) == (file is None):
        raise UserError("give either --prompt or --prompt-file; see --help")
    if file is not None:
        try:
            raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
            text = raw.decode("utf-8")
        except OSError as error:
            raise UserError(f"--prompt-file={file} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            what = f"is not UTF-8 text (invalid byte at offset {error.start})"
            raise UserError(f"--prompt-file={file} {what}") from error
    if not text:
        raise UserError("the prompt is empty; it must have at least one token")
    return text
