"""Text from files, models and other processes does not control a terminal."""

import importlib
import io

import pytest
from rich.table import Table

from mtraining_jax.utils.console import Output
from mtraining_jax.utils.printable import printable
from mtraining_jax.utils.signals import exit_immediately
from mtraining_jax.utils.text import print_text

CLEAR, TITLE = "\x1b[2J", "\x9d0;title\x07"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\n日本 é 👩‍💻", "a\tb\n日本 é 👩‍💻"),
        (CLEAR + TITLE, r"\x1b[2J\x9d0;title\x07"),
        ("over\rwritten\b\x7f", r"over\rwritten\x08\x7f"),
        ("name\udcff", r"name\udcff"),  # a byte of a file name
        (r"\x1b", r"\x1b"),
    ],
)
def test_control_characters_are_escaped(text, shown):
    assert printable(text) == shown
    shown.encode()


def test_a_console_prints_text_as_it_is(monkeypatch):
    monkeypatch.setattr("sys.stdout", out := io.StringIO())
    table = Table("[bold]name", title=TITLE, box=None)
    table.add_row(f"[/b]{CLEAR}")
    console = Output()
    console.print(table)
    console.print(f"[red]{CLEAR}", "[/]")
    lines = [line.strip() for line in out.getvalue().splitlines()]
    shown = [r"\x9d0;title\x07", "[bold]name", r"[/b]\x1b[2J", r"[red]\x1b[2J [/]"]
    assert lines == shown


def test_texts_of_training_data_are_escaped(capsys):
    assert print_text(f"a\n{CLEAR}\n") == 0
    assert capsys.readouterr().out == "a\n\\x1b[2J\n"


@pytest.mark.parametrize(
    "command",
    ["cli.train", "cli.generate", "cli.evaluate", "cli.inspect_data",
     "cli.tokenize_corpus", "report", "check_cluster"],
)  # fmt: skip
def test_errors_of_commands_name_escaped_files(command, capsys):
    main = importlib.import_module(f"mtraining_jax.{command}").main
    assert main([f"--{CLEAR}={TITLE}"]) == 2
    assert main([f"--config={CLEAR}"]) == 2
    out, err = capsys.readouterr()
    assert r"\x1b[2J" in err and not set(out + err) & {"\x1b", "\x9d", "\x07"}


def test_a_sentence_that_ends_a_process_is_escaped(monkeypatch):
    written = []
    monkeypatch.setattr("os.write", lambda _, text: written.append(text))
    monkeypatch.setattr("os._exit", written.append)
    exit_immediately(3, f"process {CLEAR}\udcff failed")
    assert written == [rb"stopped: process \x1b[2J\udcff failed" + b"\n", 3]
