"""The arguments of evaluate.py."""

from pathlib import Path

import pytest

from mtraining_jax.cli.evaluate import help_text, main, parse
from mtraining_jax.tools.evaluate.tasks import TASKS
from mtraining_jax.utils.errors import UserError

NEEDED = "--model {} --tasks needle,passkey --lengths 4096,8k,1M"


def parsed(folder, arguments=""):
    return parse(f"{NEEDED.format(folder)} {arguments}".split())


def test_arguments_are_parsed(tmp_path):
    request = parsed(tmp_path)
    assert request.tasks == ["needle", "passkey"] and request.lengths == [4096, 8192, 1048576]
    assert request.attentions == ("dense",) and request.samples == 20 and not request.generate
    assert request.output == Path("evaluations") / tmp_path.name
    request = parsed(
        tmp_path,
        "--attention both --depths 7 --task.essays=e.txt --sparsity.max_verticals 512 --generate "
        f"--parallel.nodes=2 --second-model {tmp_path.parent} --output out",
    )
    assert request.attentions == ("dense", "sparse") and request.generate
    assert request.options == {"depths": "7", "essays": "e.txt"}
    assert request.overrides == {"sparsity.max_verticals": "512", "parallel.nodes": "2"}
    assert list(request.models) == ["model", "second"] and request.output == Path("out")
    request = parsed(tmp_path, "--tasks needle, passkey recall --lengths 4K 8K")
    assert request.tasks == ["needle", "passkey", "recall"] and request.lengths == [4096, 8192]
    assert parse(["--report", "somewhere"]).report == Path("somewhere")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--lenghts 3", "unknown option --lenghts; see --help"),
        ("--sparsity.kind", "--sparsity.kind needs a value: --sparsity.kind=VALUE"),
        ("--samples 0", "argument --samples: 0 must be an integer of at least 1"),
        ("--samples many", "argument --samples: many must be an integer of at least 1"),
        ("--attention some", "invalid choice: 'some'"),
        ("--lengths 4x", '--lengths: "4x" must be a positive number of tokens, such as 4096'),
        ("--second-model nowhere", "nowhere is not a folder"),
        ("--second-model {0}", "is the same folder as --model"),
        ("--tasks ,", "--tasks is missing"),
        ("--output {0}/.file", ".file is a file; it must be a folder, new or existing"),
        ("--output s3://a/b", "argument --output: s3://a/b is a URL; only local paths are"),
    ],
)
def test_mistakes_end_in_a_sentence(tmp_path, arguments, sentence):
    (tmp_path / ".file").touch()
    with pytest.raises(UserError) as error:
        parsed(tmp_path, arguments.format(tmp_path))
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_an_error_has_no_traceback(tmp_path, capsys):
    assert main(["--report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} contains no evaluation results\n"
    assert main(["--model", str(tmp_path)]) == 2
    assert "error: --tasks is missing" in capsys.readouterr().err


def test_help_describes_every_task():
    text = help_text()
    words = text.replace(",", " ").split()
    assert all(name in words for name in TASKS.names)
    assert max(map(len, text.splitlines())) <= 100
    assert "--task.depths" in text and "--second-model FOLDER" in text
