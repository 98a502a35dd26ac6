"""Commands run as `mtraining NAME` and by `python -m`, and print commands that work there."""

import importlib
import importlib.metadata
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mtraining_jax
from mtraining_jax.__main__ import COMMANDS, main
from mtraining_jax.utils.invocation import command_of, command_with

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def console_script(tmp_path, monkeypatch) -> Path:
    """The script that an installation writes, on the PATH and running."""
    script = tmp_path / "mtraining"
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(script), "train", "--config", "tiny"])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("UV", raising=False)
    return script


def test_the_package_installs_one_console_command(capsys):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (name,) = scripts
    entry_point = importlib.metadata.EntryPoint(name, scripts[name], "console_scripts")
    assert name == "mtraining" and entry_point.load()(["--version"]) == 0
    assert capsys.readouterr().out == f"mtraining-jax {mtraining_jax.__version__}\n"


def test_every_module_with_a_command_has_its_name():
    modules = [
        f"cli.{path.stem}"
        for path in (ROOT / "mtraining_jax/cli").glob("*.py")
        if "\ndef main(" in path.read_text()
    ]
    assert {module for module, _ in COMMANDS.values()} == {*modules, "report", "check_cluster"}


@pytest.mark.parametrize("module", [module for module, _ in COMMANDS.values()])
def test_modules_run_with_python_m(module, monkeypatch, capsys):
    name = f"mtraining_jax.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)  # runpy warns of modules in use
    for arguments, status in (["--version"], 0), (["--nonsense=1"], 2):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as exit_:
            runpy.run_module(name, run_name="__main__")
        assert exit_.value.code == status
    out, err = capsys.readouterr()
    assert out == f"mtraining-jax {mtraining_jax.__version__}\n" and err.startswith("error: ")


def test_missing_and_unknown_commands(capsys):
    for arguments, problem in ([], "no command; choose one of train, "), (
        ["evalute"],
        'unknown command "evalute"; did you mean "evaluate"? Choose one of train, ',
    ):  # fmt: skip
        assert main(arguments) == 2
        assert capsys.readouterr().err.startswith(f"error: {problem}")
    assert main(["train", "--config=tiny", "--run.steps=0"]) == 2
    assert "run.steps = 0 is not allowed" in capsys.readouterr().err


def test_help_names_the_command_as_it_was_started(console_script, capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: mtraining COMMAND ") and all(name in out for name in COMMANDS)
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        out = capsys.readouterr().out
        assert (
            out.startswith(f"usage: mtraining {name} ") and ".py " not in out.partition("\n\n")[0]
        )


def test_help_loads_no_jax():
    code = (
        "import sys\nfrom mtraining_jax.__main__ import COMMANDS, main\n"
        "status = [main([*name, '--help']) for name in ([], *([x] for x in COMMANDS))]\n"
        "slow = {'jax', 'flax', 'grain', 'orbax', 'pyarrow', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(', '.join(slow) or any(status))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_commands_of_an_installation(console_script, monkeypatch):
    assert command_of("tokenize_corpus") == "mtraining tokenize-corpus"
    assert command_with(["--run.steps=9"]) == "mtraining train --config tiny --run.steps=9"
    monkeypatch.setenv("UV", "/usr/bin/uv")
    assert command_of("evaluate") == "uv run mtraining evaluate"
    monkeypatch.delenv("UV")
    monkeypatch.setenv("PATH", "")  # as after `.venv/bin/mtraining`
    assert command_of("evaluate") == f"{console_script} evaluate"


def test_commands_of_a_checkout(monkeypatch):
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["train.py", "--config=tiny"])
    assert command_of("train") == "python train.py"
    assert command_of("generate") == "python generate.py"
    assert command_of("report") == "python -m mtraining_jax report"  # no script in the root
    monkeypatch.setenv("UV", "/usr/bin/uv")
    assert command_of("evaluate") == "uv run evaluate.py"
    assert command_of("report") == "uv run python -m mtraining_jax report"
    monkeypatch.chdir(ROOT / "tests")  # a train.py of someone else
    assert command_of("generate") == "uv run python -m mtraining_jax generate"


@pytest.mark.parametrize("name", ["mtraining_jax.__main__", "mtraining_jax.cli.evaluate"])
def test_commands_after_python_m(name, monkeypatch):
    module = importlib.import_module(name)
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.setattr(sys, "argv", [module.__file__, "train", "--dtype=float32"])
    assert command_of("generate") == "python -m mtraining_jax generate"
    again = f"python -m {name.removesuffix('.__main__')} train --dtype=float32 --seed=9"
    assert command_with(["--seed=9"]) == again
