"""The command `generate.py`, and the function behind it."""

import io
import json
import sys

import jax
import jax.numpy as jnp
import pytest

import mtraining_jax
from mtraining_jax.cli import generate
from mtraining_jax.data.tokenizer import make_tokenizer
from mtraining_jax.tools.evaluate.load import Loaded
from mtraining_jax.tools.evaluate.model import Generated
from mtraining_jax.tools.evaluate.tasks import records
from mtraining_jax.utils import text as text_output
from mtraining_jax.utils.errors import UserError
from tests.data.chat.chat_folders import template_of, write_folder
from tests.models.common import CHECKPOINTS

FOLDER = str(CHECKPOINTS / "llama3_tiny")


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command on one of the test devices; returns status, new text and messages."""
    monkeypatch.setattr(generate, "set_platform", lambda cpu_devices: None)

    def run(*arguments):
        status = generate.main(arguments)
        return status, *capsys.readouterr()

    return run


ON_ONE = ("--parallel.devices_per_node=1", "--sparsity.block_size=16")


def test_texts_are_continued(command, monkeypatch, tmp_path):
    model = ("--model", FOLDER, "--tokenizer", "bytes", "--max-new-tokens=5", *ON_ONE)
    status, text, messages = command(*model, "--prompt", "Here we go. ")
    assert status == 0 and "5 new tokens" in messages and "density 1.000" in messages
    assert "note: " not in messages
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfHere we go. ")))
    monkeypatch.setattr(Loaded, "note_on_dense_use", lambda self: "note: trained sparse")
    status, again, messages = command(*model, "--prompt-file", "-")
    assert (status, again) == (0, text) and "note: trained sparse" in messages
    file = tmp_path / "prompts.jsonl"
    text_of_file = '\ufeff{"id": "\\ud800", "prompt": "Here we go. "}\n\n{"prompt": "a"}\n'
    file.write_text(text_of_file, encoding="utf-8")
    status, lines, messages = command(*model, "--prompts", str(file))
    first, second = map(json.loads, lines.splitlines())
    expected = {"prompt": "Here we go. ", "text": text[:-1], "tokens": 5, "stopped": "length"}
    assert status == 0 and first == {"id": "\ud800"} | expected and second["prompt"] == "a"
    assert "2 prompts read in" in messages and "10 new tokens" in messages
    file.write_text('{"prompt": 3}')
    status, _, messages = command(*model, "--prompts", str(file))
    assert status == 2 and 'prompts.jsonl, line 1: "prompt" must be a text' in messages

    engine = mtraining_jax.Engine.load(
        FOLDER, tokenizer="bytes", overrides=dict(x[2:].split("=") for x in ON_ONE)
    )
    options = mtraining_jax.GenerateOptions(max_new_tokens=5)
    found = mtraining_jax.generate(engine, "Here we go. ", options)
    assert found.text + "\n" == text and len(found.tokens) == 5
    again, other = mtraining_jax.generate(engine, ["Here we go. ", "a"], options)
    assert (again.text, other.text) == (first["text"], second["text"])
    # So hot that only the random numbers decide: each token has its own.
    options = mtraining_jax.GenerateOptions(max_new_tokens=4, temperature=1e9, seed=1)
    for hot in mtraining_jax.generate(engine, ["a", "Here we go. "], options):
        noise = [jax.random.fold_in(jax.random.key(1), number) for number in range(4)]
        vocab = jnp.zeros(engine.vocab_size)
        assert list(hot.tokens) == [jax.random.categorical(key, vocab) for key in noise]
    with pytest.raises(UserError, match="prompt 2: 400 tokens and 200 new ones are more than"):
        engine.encode(["a", "b" * 400], 200)
    with pytest.raises(UserError, match="^the text is not Unicode .*surrogates not allowed"):
        engine.encode(["\ud800"], 1)
    with pytest.raises(UserError, match="^prompt 1: a int is not a text; for token ids use Eng"):
        mtraining_jax.generate(engine, [3, 4], options)
    with pytest.raises(UserError, match="^options is a dict; pass GenerateOptions"):
        mtraining_jax.generate(engine, "a", {"seed": 1})
    with pytest.raises(UserError, match="^max_new_tokens: not allowed .*=GenerateOptions"):
        mtraining_jax.generate(engine, "a", max_new_tokens=1)


def test_the_rate_is_that_of_decoded_tokens(command, monkeypatch, tmp_path):
    (file := tmp_path / "prompts.txt").write_text("a\nb\nc\n")
    for tokens, shown in (
        (((1, 2, 3), (4,), ()), "4 new tokens in 1.50 s (1.3 tokens/s)\n"),
        (((1,), (2,), (3,)), "3 new tokens in 1.50 s\n"),  # read with the prompts
    ):

        def answered(self, prompts, options, stop_ids, batch_size, on_result, tokens=tokens):
            for number, new in enumerate(tokens):
                on_result(number, Generated(new, "", "length", 1.0, 0.5, None))

        monkeypatch.setattr(mtraining_jax.Engine, "generate_many", answered)
        model = ("--model", FOLDER, "--tokenizer=bytes", *ON_ONE)
        status, _, messages = command(*model, f"--prompts={file}")
        assert status == 0 and messages.endswith(shown)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_answers_do_not_control_a_terminal(command, monkeypatch, tmp_path):
    def answered(self, ids, options, on_text, stop_ids):
        text = "a\tb\n\x1b[2J\x9b"
        if on_text is not None:
            on_text(text)
        return Generated((1,), text, "end", 0.0, 0.0, None)

    def all_answered(self, prompts, options, stop_ids, batch_size, on_result):
        on_result(0, answered(self, prompts[0], options, None, stop_ids))

    monkeypatch.setattr(mtraining_jax.Engine, "generate", answered)
    monkeypatch.setattr(mtraining_jax.Engine, "generate_many", all_answered)
    model = ("--model", FOLDER, "--tokenizer=bytes", *ON_ONE)
    status, text, _ = command(*model, "--prompt=a")  # a file or pipe gets what the model wrote
    assert (status, text) == (0, "a\tb\n\x1b[2J\x9b\n")
    (file := tmp_path / "prompts.txt").write_text("a")
    for prompt, shown in (
        ("--prompt=a", "a\tb\n\\x1b[2J\\x9b\n"),
        (f"--prompts={file}", r'"text": "a\tb\n\u001b[2J\x9b"'),
    ):
        monkeypatch.setattr(sys, "stdout", terminal := Terminal())
        assert command(*model, prompt)[0] == 0 and shown in terminal.getvalue()


class ClosedPipe(io.StringIO):
    def write(self, _):
        raise BrokenPipeError


def test_a_closed_pipe_ends_the_command(command, monkeypatch):
    redirected = []
    monkeypatch.setattr(text_output, "redirect_to_devnull", redirected.append)
    monkeypatch.setattr(sys, "stdout", ClosedPipe())
    with pytest.raises(SystemExit, match="^0$"):
        command("--model", FOLDER, "--tokenizer=bytes", "--prompt=a", *ON_ONE)
    assert redirected == [1]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--max-new-tokens=0", "--max-new-tokens=0 must be an integer (at least 1)"),
        ("--temperature=-1", "--temperature=-1.0 must be a finite number (at least 0)"),
        ("--seed=-1", "--seed=-1 must be an integer (at least 0"),
        ("--stop=", "--stop=('',) must be a list of non-empty strings"),
    ],
)
def test_numbers_are_checked_before_jax_starts(command, monkeypatch, argument, message):
    monkeypatch.setattr(generate, "set_platform", None)  # a call would be a TypeError
    status, _, messages = command("--model", FOLDER, "--prompt=a", argument)
    assert status == 2 and message in messages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--model is missing"),
        (("--model", FOLDER), "give one of --prompt, --prompt-file and --prompts"),
        (("--model", FOLDER, "--prompts=/dev/null"), "--prompts=/dev/null has no prompt"),
        (("--model", FOLDER, "--prompt="), "the prompt is empty"),
        (("--model", FOLDER, "--prompt-file=no.txt"), "--prompt-file: no.txt cannot be read"),
        (("--model", "/no/folder", "--prompt=a"), "/no/folder contains no model"),
        (("--model", FOLDER, "--prompt=a"), "has no tokenizer; set one with --tokenizer=PATH"),
        (("--model", FOLDER, "--prompt=a", "--top-p=0.9"), "--top-p=0.9 has no effect with --temp"),
        (
            ("--model", FOLDER, "--prompt=a", "--sparsity.tau=0.5"),
            "--sparsity.tau has no effect with --attention=dense",
        ),
        (("--model", FOLDER, "--prompt=a", "--temperature=1", "--top-p=2"), "--top-p=2.0 must be"),
        (("--model", FOLDER, "--prompt=a", "--best"), "unknown option --best"),
        (("--model", FOLDER, "--prompt=a", "--model.dtype"), "--model.dtype needs a value"),
        (("--model", FOLDER, "--prompt=a", "--seed=x"), "argument --seed: invalid int value"),
    ],
)
def test_mistakes_end_in_a_sentence(command, arguments, message):
    status, text, messages = command(*arguments)
    assert status == 2 and text == ""
    assert messages.splitlines()[-1].startswith("error: ") and message in messages


def test_chat(command, tmp_path, monkeypatch):
    tokenizer = write_folder(tmp_path / "t", template_of("smollm2", marked=False))
    model = ("--model", FOLDER, "--max-new-tokens=3", *ON_ONE, "--chat")
    asked, file = {"role": "user", "content": "Hi"}, tmp_path / "prompts.jsonl"
    prompts = ("Hi", [asked], {"messages": [asked], "tools": []})
    file.write_text("".join(json.dumps({"prompt": x}) + "\n" for x in prompts))
    calls = []
    plain = mtraining_jax.Engine.generate_many

    def recorded(self, prompts, options, stop_ids, batch_size, on_result):
        found = plain(self, prompts, options, stop_ids, batch_size, on_result)
        calls.extend((ids.tolist(), stops) for ids, stops in zip(prompts, stop_ids, strict=True))
        ends = [frozenset(x.tokens[:1]) for x in found]
        assert {x.stopped for x in plain(self, prompts, options, ends)} == {"end"}
        return found

    monkeypatch.setattr(mtraining_jax.Engine, "generate_many", recorded)
    status, lines, _ = command(*model, "--tokenizer", tokenizer, "--prompts", str(file))
    assert status == 0 and len({json.loads(line)["text"] for line in lines.splitlines()}) == 1
    loaded = make_tokenizer(tokenizer, "<|endoftext|>")
    text = "<|im_start|>system\nYou are small.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert [ids for ids, _ in calls] == 3 * [
        loaded.encode(f"{text}<|im_start|>assistant\n").tolist()
    ]
    assert all(int(loaded.encode("<|im_end|>")[0]) in stop_ids for _, stop_ids in calls)
    (tmp_path / "one.json").write_text(json.dumps([asked, asked | {"role": "assistant"}]))
    prompt = ("--prompt-file", str(tmp_path / "one.json"))
    status, _, messages = command(*model, "--tokenizer", tokenizer, *prompt)
    assert status == 2 and "one.json: the last message has the role assistant; rem" in messages
    status, _, messages = command(*model, "--tokenizer=bytes", "--prompt=Hi")
    assert status == 2 and 'data.tokenizer = "bytes" has no chat template' in messages


@pytest.mark.parametrize("option", ["--prompts", "--prompt-file"])
def test_prompts_without_end_are_refused(command, option, monkeypatch):
    message = f"error: {option}: /dev/zero has more than 256 MiB\n"
    assert command("--model", FOLDER, f"{option}=/dev/zero") == (2, "", message)
    if option == "--prompts":
        return
    with open("/dev/zero", "rb") as zeros:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(zeros))
        assert command("--model", FOLDER, "--prompt-file=-") == (2, "", message)


def test_a_line_without_end_is_refused(command, monkeypatch, tmp_path):
    monkeypatch.setattr(records, "LARGEST_TEXT", 2**20)
    (link := tmp_path / "link.jsonl").symlink_to("/dev/zero")
    message = f"error: --prompts: {link}, line 1 has more than 1,048,576 characters\n"
    assert command("--model", FOLDER, f"--prompts={link}") == (2, "", message)
