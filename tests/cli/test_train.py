"""Command line of the trainer: arguments, output and exit status."""

import importlib
import os
import signal
import subprocess
import sys
import time
import tomllib
import types
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest

import mtraining_jax
from mtraining_jax.cli.argument_parser import config_parser, parse_with_overrides
from mtraining_jax.cli.train import main
from mtraining_jax.config import Config, available_configs
from mtraining_jax.patterns.registry import PATTERNS
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.jax_platform import abort_stuck_collectives, check_devices, set_platform

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def runs(monkeypatch) -> list[Config]:
    """Replaces training and records the configurations that it is called with."""
    called: list[Config] = []
    training = types.SimpleNamespace(run=lambda config, signals: called.append(config))
    monkeypatch.setitem(sys.modules, "mtraining_jax.trainer", training)
    monkeypatch.setitem(sys.modules, "mtraining_jax.training", types.ModuleType("training"))
    return called


def parse(*arguments):
    parser = config_parser()
    parser.add_argument("--print-config", action="store_true")
    return parse_with_overrides(parser, arguments)


def test_arguments():
    options = parse(
        "--run.steps", "3", "--config=tiny", "--data.paths=a=b", "--optimizer.lr", "-1", "-h"
    )
    assert options.config == "tiny" and options.help == "" and not options.print_config
    assert options.overrides == {"run.steps": "3", "data.paths": "a=b", "optimizer.lr": "-1"}
    assert parse("--run.seed=3", "--run.seed=4").overrides == {"run.seed": "4"}


def test_a_switch_may_stand_alone():
    options = parse("--metrics.wandb", "--config", "tiny", "--parallel.fsdp")
    assert options.overrides == {"metrics.wandb": ..., "parallel.fsdp": ...}
    config = Config.load(options.config, options.overrides)
    assert config.metrics.wandb and config.parallel.fsdp
    assert parse("--metrics.wandb", "false").overrides == {"metrics.wandb": "false"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tiny"], 'unexpected argument "tiny"; did you mean --config tiny?'),
        (
            ["--config", "tiny", "--data.paths", "a", "b"],
            'unexpected argument "b"; quote a list as one: \'["a", "b"]\'',
        ),
        (["--config"], "argument --config: expected one argument; see --help"),
        (["--confg", "tiny"], "unknown option --confg; did you mean --config?"),
        (["--print_config"], "unknown option --print_config; did you mean --print-config?"),
        (["--steps=3"], "unknown option --steps; did you mean --run.steps?"),
        (["--model={}"], "--model is a section; set one of its fields: --model.FIELD=VALUE"),
        (["--zzz"], "unknown option --zzz; --help lists all options"),
        (["-run.steps=3"], '"-run.steps=3" begins with one dash; did you mean --run.steps=3?'),
        (["-config", "tiny"], '"-config" begins with one dash; did you mean --config?'),
        (["--print-config=no"], "argument --print-config: ignored explicit argument 'no'; see --h"),
        (["--config=a", "--config=b"], "--config is given 2 times: a, b; give one;"),
        (["--save-steps=3"], "unknown option --save-steps; did you mean --checkpoint.interval?"),
    ],
)
def test_wrong_arguments(arguments, sentence):
    with pytest.raises(UserError) as error:
        parse(*arguments)
    assert str(error.value).splitlines()[0].startswith(sentence)


def test_it_runs_the_configuration(runs, capsys):
    assert main(["--config", "tiny", "--run.seed=5"]) == 0
    assert runs == [Config.load("tiny", {"run.seed": "5"})]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--eval.num_batches=3"], "eval.interval = 0 disables evaluation"),
        (["--audit.num_queries=8"], "audit.interval = 0 disables audits"),
        (["--profile.steps=3"], "profile.start = none disables tracing"),
        (
            ["--sparsity.dense_cooldown_steps=5", "--sparsity.kind=dense"],
            'sparsity.kind = "dense" computes',
        ),
        (["--sparsity.tune_min=0.5"], 'sparsity.tune = "none" disables tuning'),
        (
            ["--optimizer.final_lr_ratio=0.2", "--optimizer.schedule=constant"],
            'optimizer.schedule = "constant" does not decay the learning rate',
        ),
        (["--model.override=rope_theta"], "model.init_from = none has no config.json to override"),
        (
            [
                "--sparsity.tau=0.5", "--model.family=mistral",
                "--model.sliding_window=9", "--checkpoint.export_hf=true", "--data.mode=pack",
            ],
            "all layers have a sliding window, and no sparse pattern",
        ),
        (["--data.balance=length"], "parallel.replicas = 1 has a single data-parallel replica"),
    ],
)  # fmt: skip
def test_note_on_an_option_without_effect(runs, capsys, arguments, reason):
    name = arguments[0][2:].partition("=")[0]
    assert main(["--config=tiny", *arguments]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"note: {name} has no effect: {reason}") and len(runs) == 1


def test_note_on_documents_that_are_all_dense(runs, capsys):
    few = ["--sparsity.kind=block_topk", "--sparsity.top_blocks=64"]
    for arguments, least, field in ([], 8192, "min_sparse_tokens"), (few, 2049, "top_blocks"):
        assert main(["--config=tiny", "--data.mode=pack", *arguments]) == 0
        (line,) = capsys.readouterr().err.splitlines()
        assert f"because data.seq_len = 2048 is less than {least} tokens; for " in line
        assert line.endswith(f"for sparse attention set sparsity.{field} lower")
    assert main(["--config=tiny", "--data.mode=pack", "--sparsity.min_sparse_tokens=2048"]) == 0
    assert capsys.readouterr().err == ""


def test_note_on_a_moved_run_folder(runs, capsys, tmp_path):
    (tmp_path / "moved" / "checkpoints").mkdir(parents=True)
    path = tmp_path / "moved" / "config.toml"
    path.write_text('base = "tiny"')
    assert main([f"--config={path}"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"note: {path} belongs to a run folder that was moved or copied; ")
    assert main([f"--config={path}", *line.split()[-2:]]) == 0
    assert capsys.readouterr().err == "" and runs[-1].run.folder == tmp_path / "moved"


def test_note_on_exporting_a_sparse_model(runs, capsys):
    assert main(["--config=tiny", "--checkpoint.export_hf=true"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: Hugging Face transformers runs the exported model with dense att")
    assert "dense attention unless it imports the exported sparse_attention.py; a model" in line
    assert "--sparsity.dense_cooldown_steps=12 " in line
    for fix in ("dense_cooldown_steps=12", "dense_interval=10", "kind=dense"):
        arguments = ["--checkpoint.export_hf=true", f"--sparsity.{fix}"]
        assert main(["--config=tiny", *arguments]) == 0
        assert capsys.readouterr().err == ""


def test_no_note_on_an_option_with_effect(runs, capsys):
    read = [
        "--sparsity.tau=0.5",
        "--eval.interval=3",
        "--eval.num_batches=3",
        "--audit.num_queries=8",
    ]
    audits = ["--audit.num_queries=8", "--audit.interval=2"]
    assert main(["--config=tiny", *read, *audits]) == 0
    assert capsys.readouterr().err == ""


def test_print_config(runs, capsys, tmp_path):
    assert main(["--config=tiny", "--run.steps=123", "--print-config"]) == 0
    path = tmp_path / "printed.toml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert Config.load(path) == Config.load("tiny", {"run.steps": "123"})
    assert runs == []


def test_version(runs, capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mtraining-jax {mtraining_jax.__version__}\n"
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert mtraining_jax.__version__ == pyproject["project"]["version"]
    assert runs == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
@pytest.mark.parametrize(
    "arguments",
    [
        ["mtraining_jax", "train", "--help"],
        ["mtraining_jax.cli.inspect_data", "--config=tiny", "--data.source=synthetic"],
    ],
)
def test_output_that_cannot_be_written(arguments):
    command = [sys.executable, "-m", *arguments]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2
    assert result.stderr == "error: the output cannot be written (No space left on device)\n"
    reader, writer = os.pipe()
    os.close(reader)  # as of `| head`
    result = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert result.returncode == 0 and result.stderr == ""


def test_an_error_that_cannot_be_written_keeps_its_status(monkeypatch):
    full = Mock(write=Mock(side_effect=OSError(28, "No space left on device")))
    monkeypatch.setattr(sys, "stderr", full)
    assert main(["--config=tyny"]) == 2
    assert full.write.called


def test_missing_packages_and_old_python():
    def error_of(*arguments):
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        return done.stderr

    for script in ("train.py", "generate.py", "evaluate.py"):
        error = error_of("-S", script)  # without site-packages
        assert error.startswith(
            "error: the package flax is not installed; in a checkout, type `pip install uv"
        )
    error = error_of("-c", "import sys; sys.version_info = (3, 11, 0); import mtraining_jax.cli")
    assert error.startswith(
        "error: mtraining-jax needs Python 3.12 or newer; in a checkout, type `pip install uv"
    )


def test_options_of_another_pattern_or_source(runs, capsys, monkeypatch):
    monkeypatch.setattr(PATTERNS, "_loaded", {})  # without plug-ins of other tests
    assert main(["--config=tiny", "--sparsity.top_p=0.4", "--data.text_field=body"]) == 2
    assert runs == [] and capsys.readouterr().err.splitlines() == [
        "error: command line: sparsity.top_p is an option of sparsity.kind = "
        '"vertical_slash", but sparsity.kind = "sampled_rows"; remove it or change sparsity.kind',
        'error: command line: data.text_field is an option of data.source = "jsonl", "parquet", '
        '"hf_disk" or "mds", but data.source = "python_stdlib"; remove it or change data.source',
    ]


def test_help(runs, capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in available_configs())
    assert "--model.num_layers  an integer (at least 1 and at most 4096); required" in out
    assert "--sparsity.tau " in out and "--sparsity.top_p" not in out
    assert main(["--help", "sparsity", "--sparsity.kind=vertical_slash"]) == 0
    out = capsys.readouterr().out
    assert "--sparsity.top_p " in out and "--sparsity.tau" not in out and "--run." not in out
    assert main(["--help", "sparcity"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: --help sparcity: sparcity is not a section or field; did you mean sparsity? "
        "Choose one of run, model, "
    )
    assert main(["--help=run.steps"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "[run]", "--run.steps", "Total"
    ]  # fmt: skip
    assert main(["--help", "eval.data"]) == 0
    assert "--eval.data.mode " in capsys.readouterr().out
    assert runs == []


@pytest.mark.parametrize("module", ["evaluate", "generate", "inspect_data", "tokenize_corpus"])
def test_help_of_other_commands(module, capsys):
    command = importlib.import_module(f"mtraining_jax.cli.{module}").main
    assert command(["--help"]) == 0 and capsys.readouterr().out.startswith("usage: ")
    arguments = ["--help", "sparsity", "--model=x", "--sparsity.kind=vertical_slash"]
    assert command(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("[sparsity]") and "--sparsity.top_p " in out and "usage" not in out
    assert command(["--help=no"]) == 2 and "--help no: no is not a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["--config=tiny", "--run.steps=0"], 1),
        (["--config=tiny", "--run.steps=0", "--optimizer.lr=none"], 2),
        (["--config=nowhere"], 1),
        (["--stepz=0", "--seads=3"], 2),
        ([], 1),
    ],
)
def test_mistakes_end_with_status_2_before_the_run(runs, capsys, arguments, lines):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert runs == [] and out == ""
    assert [line[:7] for line in err.splitlines()] == ["error: "] * lines


def test_a_user_error_of_the_run_is_printed_alike(runs, capsys, monkeypatch):
    def run(config, signals):
        raise UserError(f"{config.run.name} has no data")

    monkeypatch.setattr(sys.modules["mtraining_jax.trainer"], "run", run)
    assert main(["--config=tiny"]) == 2
    assert capsys.readouterr().err == "error: tiny has no data\n"


def test_a_stopped_run_has_exit_status_75(runs, capsys, monkeypatch):
    def run(config, signals):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(sys.modules["mtraining_jax.trainer"], "run", run)
    assert main(["--config=tiny"]) == 75
    assert capsys.readouterr().err == "stopped: SIGTERM received before the first step\n"


def test_other_errors_pass_through(runs, monkeypatch):
    def run(config, signals):
        raise ValueError("a bug")

    monkeypatch.setattr(sys.modules["mtraining_jax.trainer"], "run", run)
    with pytest.raises(ValueError, match="a bug"):
        main(["--config=tiny"])


def test_cpu_devices_are_set_before_jax_starts():
    # A new process, since the devices of this one are fixed already.
    code = """if True:
        import jax
        from mtraining_jax.utils.jax_platform import set_platform
        from mtraining_jax.config import Config
        from mtraining_jax.tools.plan.memory import pinned_limit
        config = Config.load("qwen3b_512k", {"model.remat": "full_offload"})
        assert pinned_limit(config) > 4  # counted by JAX, without devices
        set_platform(3)
        print(jax.default_backend(), jax.device_count())
    """
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["cpu", "3"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("Unable to initialize backend 'x'\nand more"), "Unable to initialize backe"),
        (AssertionError(), "no platform is available"),
    ],
)
def test_error_if_jax_finds_no_device(monkeypatch, error, reason):
    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(UserError, match=f"{reason}.*; JAX_PLATFORMS=cuda in the environment"):
        check_devices()
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(UserError, match="--parallel.cpu_devices=1 to run on the CPU"):
        check_devices()


def test_error_if_jit_is_disabled():
    with jax.disable_jit(), pytest.raises(UserError, match="JAX_DISABLE_JIT is set"):
        check_devices()


def test_xla_aborts_stuck_collectives(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_nccl_termination_timeout_seconds=7")
    abort_stuck_collectives(3600)
    flags = dict(flag[2:].split("=") for flag in os.environ["XLA_FLAGS"].split())
    assert flags == {
        "xla_gpu_nccl_termination_timeout_seconds": "7",
        "xla_gpu_execution_terminate_timeout": "3600s",
    }
    # An unknown name is an error here, and the end of the process in XLA_FLAGS.
    jax.jit(lambda x: x + 1).lower(1).compile(compiler_options=flags)


def test_jax_uses_most_gpu_memory_by_default(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "none")  # restored after the test
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")
    set_platform(None)
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
    assert int(os.environ["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"]) >= 1
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")
    set_platform(None, 1)
    assert os.environ["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "1"
    set_platform(None, 2)  # the environment wins
    assert os.environ["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "1"
    assert 0.75 < float(os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"]) < 1
