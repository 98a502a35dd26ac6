"""The command `generate`: continues prompts, and streams the new text of a single one."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from mtraining_jax.cli.model_command import (
    at_least,
    check_required,
    forwarded_options,
    model_parser,
    run_command,
)
from mtraining_jax.data.chat.conversation import Conversation, read_conversation
from mtraining_jax.data.files import errors_as
from mtraining_jax.tools.evaluate.engine.options import GenerateOptions
from mtraining_jax.tools.evaluate.model import Generated
from mtraining_jax.tools.evaluate.tasks.records import (
    Record,
    iterate_records,
    read_json,
    read_stream,
    read_text,
)
from mtraining_jax.utils.console import Output
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.jax_platform import set_platform
from mtraining_jax.utils.printable import printable
from mtraining_jax.utils.text import counted, print_text

_USAGE = """\
--model FOLDER (--prompt TEXT | --prompt-file FILE | --prompts FILE) [options]

  --model FOLDER        run folder, Hugging Face checkpoint or adapters, or hf://OWNER/NAME
  --prompt TEXT         text to continue; no chat template is applied without --chat
  --prompt-file FILE    read the prompt from a UTF-8 text file or pipe; - reads standard input
  --prompts FILE        continue many prompts: the lines of a text file, or the field "prompt" of
                        JSON lines (.jsonl); prints one JSON object per prompt, with the fields of
                        its line, text, tokens and stopped
  --batch-size N        at most so many of them at a time, of similar lengths (default 8)
  --chat                answer prompts by the chat template of the tokenizer's folder, up to the
                        end of the turn (extra chat); a prompt is a message of the user, or in a
                        .json file or a field "prompt" also a list of messages, or an object with
                        "messages" and "tools"
  --max-new-tokens N    maximum number of new tokens (default 256)
  --temperature T       sampling temperature; 0 (default) is greedy decoding
  --top-p P             nucleus sampling: sample from the most likely tokens with total
                        probability P (default 1)
  --seed N              random seed of sampling (default 0)
  --stop TEXT           stop before this text, which may contain special tokens; may be given
                        several times
  --attention KIND      attention: dense (default) or sparse
  --answers KIND        what new tokens attend to after a sparse prompt: sparse (blocks that each
                        selects; the default for patterns that do) or dense (all earlier tokens)
  --dtype TYPE          compute dtype: bfloat16 or float32
  --tokenizer NAME      bytes or the path of a tokenizer.json, instead of the model's tokenizer
  --cpu-devices N       run on N virtual CPU devices
  --sparsity.FIELD=VALUE, --parallel.FIELD=VALUE, --model.FIELD=VALUE
                        override the sparse pattern, the mesh or the model, as in training
  --version             print the version and exit
  --help [SECTION]      print this help, or the fields of a section, and exit

New text goes to standard output, all other messages to standard error. On a terminal, control
characters other than newlines and tabs are printed as escapes, such as \\x1b.
"""

_NUMBERS = ("max_new_tokens", "temperature", "top_p", "seed")
_HOW = ("attention", "answers", "dtype", "tokenizer")
_INTERRUPTED = 130
_ENDS = {"end": "the end token", "stop": "a stop text", "length": "--max-new-tokens"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 2 after a user error, or 130 if interrupted."""
    return run_command("generate", arguments, lambda: _USAGE, _run)


def _run(arguments: list[str]) -> int:
    parser = model_parser()
    for name in ("prompt", "prompt-file", "prompts"):
        parser.add_argument(f"--{name}")
    for name in _NUMBERS:
        default = getattr(GenerateOptions, name)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default)
    parser.add_argument("--batch-size", type=at_least(1), default=8)
    parser.add_argument("--stop", action="append", default=[])
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--attention", choices=("dense", "sparse"), default="dense")
    parser.add_argument("--answers", choices=("sparse", "dense"))
    found, rest = parser.parse_known_args(arguments)
    overrides = forwarded_options(rest, ("sparsity", "parallel", "model"))
    check_required(found, "model")
    if found.top_p != 1 and found.temperature == 0:
        raise UserError(
            f"--top-p={found.top_p:g} has no effect with --temperature=0 (greedy decoding); set "
            "--temperature=1 to sample"
        )
    # Dense attention has a block size too.
    sparse_options = {x for x in overrides if x.startswith("sparsity.")} - {"sparsity.block_size"}
    if found.attention == "dense" and sparse_options:
        raise UserError(
            f"--{min(sparse_options)} has no effect with --attention=dense; add --attention=sparse"
        )
    numbers = {name: getattr(found, name) for name in _NUMBERS}
    try:
        options = GenerateOptions(**numbers, stop=tuple(found.stop))
    except UserError as error:  # its message starts with the field
        field, _, rest = str(error).partition("=")
        raise UserError(f"--{field.replace('_', '-')}={rest}") from None
    prompts, several = _prompts(found), found.prompts is not None
    contents = [x["prompt"] for _, x in prompts]
    if found.chat:
        contents = [_conversation(x["prompt"], where) for where, x in prompts]
    set_platform(found.cpu_devices)
    # Imported here, because it imports JAX, which reads the number of devices when it starts.
    from mtraining_jax.tools.evaluate.engine.engine import Engine

    console, to_terminal = Output(stderr=True), sys.stdout.isatty()
    try:
        with console.status(Text(printable(f"loading {found.model} ..."))) as status:
            how = {name: getattr(found, name) for name in _HOW}
            engine = Engine.load(found.model, overrides=overrides, **how)
            ids = engine.encode(contents, options.max_new_tokens)
            if (note := engine.loaded.note()) is not None:
                console.print(note)

            def write(text: str) -> None:
                status.stop()
                try:
                    print(printable(text) if to_terminal else text, end="", flush=True)
                except OSError:
                    sys.exit(print_text(""))  # an error unless the pipe is closed

            done: dict[int, Generated] = {}
            results: list[Generated] = []

            def write_lines(number: int, result: Generated) -> None:
                """Writes a line for each prompt in their order, once all before it are done."""
                done[number] = result
                while len(results) in done:
                    result = done[len(results)]
                    line = prompts[len(results)][1] | {"text": result.text}
                    line |= {"tokens": len(result.tokens), "stopped": result.stopped}
                    results.append(result)
                    text = json.dumps(line, ensure_ascii=False)
                    # Fields may have unpaired surrogates; JSON has the same escapes as Python.
                    write(text.encode("utf-8", "backslashreplace").decode() + "\n")
                status.update(f"{len(done)} of {counted(len(prompts), 'prompt')} done ...")
                status.start()

            stop_ids = [engine.stop_ids(content) for content in contents]
            status.update(f"compiling and reading {counted(len(prompts), 'prompt')} ...")
            if several:
                engine.generate_many(ids, options, stop_ids, found.batch_size, write_lines)
            else:
                results.append(engine.generate(ids[0], options, write, stop_ids[0]))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _INTERRUPTED
    if not several:
        print(flush=True)
    read, decode = sum(x.prefill_seconds for x in results), sum(x.decode_seconds for x in results)
    new = sum(len(x.tokens) for x in results)
    later = sum(max(len(x.tokens) - 1, 0) for x in results)  # the first come with the prompts
    rate = f" ({later / decode:.1f} tokens/s)" if later else ""
    density = sum(x.density or 0 for x in results) / len(results)
    end = "" if several else f"; stopped by {_ENDS[results[0].stopped]}"
    console.print(
        f"{counted(len(prompts), 'prompt')} read in {read:.2f} s at density {density:.3f}; {new} "
        f"new tokens in {decode:.2f} s{rate}{end}"
    )
    return 0


def _conversation(prompt: Any, where: str) -> Conversation:
    """The conversation of a prompt: a message of the user, messages, or messages and tools."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    given = prompt if isinstance(prompt, dict) else {"messages": prompt}
    conversation = read_conversation(given.get("messages"), given.get("tools"), where)
    if conversation.messages[-1]["role"] == "assistant":
        raise UserError(f"{where}: the last message has the role assistant; remove it to answer")
    return conversation


def _prompts(options: argparse.Namespace) -> list[tuple[str, Record]]:
    """Reads the records of the prompts with their locations, at least one."""
    given = {name: getattr(options, name) for name in ("prompt", "prompt_file", "prompts")}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        raise UserError("give one of --prompt, --prompt-file and --prompts; see --help")
    ((name, value),) = given.items()
    if name == "prompts":
        prompts = list(_lines(value, options.chat))
        if not prompts:
            raise UserError(f"--prompts={value} has no prompt")
        return prompts
    text = value if name == "prompt" else _text("--prompt-file", value)
    if not text:
        raise UserError("the prompt is empty; it must have at least one token")
    if options.chat and name == "prompt_file" and value.endswith(".json"):
        return [(value, {"prompt": read_json(Path(value).expanduser(), "--prompt-file")})]
    return [(f"--{name.replace('_', '-')}", {"prompt": text})]


def _lines(file: str, chat: bool) -> Iterator[tuple[str, Record]]:
    if not file.endswith((".jsonl", ".json")):
        for number, line in enumerate(_text("--prompts", file).split("\n"), 1):
            if line.strip():
                yield f"{file}, line {number}", {"prompt": line}
        return
    kinds = (str, list, dict) if chat else (str,)
    for where, record in iterate_records(Path(file).expanduser(), "--prompts", ("prompt",)):
        if not isinstance(record["prompt"], kinds) or not record["prompt"]:
            what = "a text or messages, and" if chat else "a text that is"
            raise UserError(f'--prompts: {where}: "prompt" must be {what} not empty')
        yield where, record


def _text(option: str, file: str) -> str:
    if file != "-":
        return read_text(Path(file), option)
    with errors_as(UserError, f"{option}: standard input is not UTF-8 text", UnicodeDecodeError):
        return read_stream(sys.stdin.buffer, option)


if __name__ == "__main__":
    sys.exit(main())
