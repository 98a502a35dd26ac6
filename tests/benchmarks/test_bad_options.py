"""Options that no benchmark can run with end in one sentence."""

import importlib

import pytest


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        ("kernels.attention", "--seq-len 1000", "--seq-len: 1000 is not a multiple of 2048"),
        ("kernels.attention", "--seq-len 2048", "--masks: B needs at least 4096 tokens"),
        ("kernels.attention", "--repeats 0", "--repeats: 0 is less than 1"),
        ("ring.attention", "--masks AX", "--masks: AX has letters other than A, B and D"),
        ("ring.attention", "--seq-len 4096", "--masks: B needs at least 8192 tokens"),
        ("ring.model", "--rows none.json", "--rows: none.json is not a file"),
        ("step.trace_summary", "none", "error: no *.trace.json.gz under"),
        ("peers.__main__", "--results x --problems 640x2", "'640x2' must look like 32768x2,"),
        ("scoreboard.__main__", "--results x --cases 640", "'640' must look like 32768,16/2"),
        ("plot_results", "x.png --page none.md", "no such file"),
        ("step.replicas", "--parallel.replicas=2", "parallel.replicas=2 cannot be set here"),
    ],
)  # fmt: skip
def test_a_bad_option_is_named(module, options, message, capsys, monkeypatch, tmp_path):
    command = importlib.import_module(f"benchmarks.{module}")
    monkeypatch.chdir(tmp_path)
    try:
        status = command.main(options.split())
    except SystemExit as error:
        status = error.code
    assert status in (1, 2) and message in capsys.readouterr().err
