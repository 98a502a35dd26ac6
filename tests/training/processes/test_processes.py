"""Real processes: killed while saving, and several that train and stop together."""

import shutil
import signal
import socket
import time

import numpy as np
import pytest

from mtraining_jax.training.checkpoint import newest_step
from mtraining_jax.training.checkpoint.run_folder import checkpoint_folder
from mtraining_jax.utils.signals import EXIT_STOPPED
from tests.training.common import changed, losses, run, start_process, written


def test_run_killed_while_saving_goes_on_from_the_last_whole_checkpoint(
    plain_config, tmp_path, capsys
):
    config = changed(
        plain_config,
        run={"steps": 1000},
        # As many devices as this process has, so that they share compiled programs.
        parallel={"cpu_devices": 8},
        checkpoint={"interval": 1, "keep": 1000},
    )
    folder = checkpoint_folder(config)
    process = start_process(config, tmp_path)
    try:
        half_written = wait_for_half_checkpoint(process, folder)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output
    assert half_written.exists()  # killed before the rename
    whole = newest_step(folder)
    half = int(half_written.name.partition(".")[0])
    assert whole is not None and half > whole

    last = half + 1
    config = changed(config, run={"steps": last})
    run(config)
    assert f"resuming from the checkpoint of step {whole}" in capsys.readouterr().out
    assert not half_written.exists() and newest_step(folder) == last
    assert [record["step"] for record in written(config)] == list(range(1, last + 1))

    # The same steps without interruption, in this process.
    expected = run(changed(config, run={"name": "whole"}, checkpoint={"interval": 0}))
    np.testing.assert_allclose(losses(written(config)), losses(expected), rtol=1e-6)


def wait_for_half_checkpoint(process, folder):
    """Waits for a checkpoint that is being written, next to a complete one; returns its folder."""
    give_up = time.monotonic() + 240
    while time.monotonic() < give_up and process.poll() is None:
        if not folder.is_dir():
            time.sleep(0.05)  # the process starts, which takes the time of a core
        elif (whole := newest_step(folder)) is not None:
            for path in folder.iterdir():
                step = path.name.partition(".")[0]
                if not path.name.isdigit() and step.isdigit() and int(step) > whole:
                    return path
        time.sleep(0.0005)
    pytest.fail("no checkpoint was seen while it was written")


def test_processes_go_on_with_a_checkpoint_of_one_and_stop_together(whole, tmp_path):
    """Two processes of one device resume the run of one with four, and the other way round.

    One of the two receives Ctrl-C, which is forwarded like a scheduler's SIGTERM.
    """
    four = changed(whole.copy("processes"), audit={"interval": 0, "masks": ()})
    shutil.rmtree(checkpoint_folder(four) / "4")
    two = changed(
        four,
        run={"steps": 5000},
        parallel={"nodes": 1, "devices_per_node": 2, "cpu_devices": 1},
        checkpoint={"interval": 4, "keep": 5000},
    )
    processes = started_together(two, tmp_path)
    try:
        while processes[0].poll() is None and written(two)[-1]["step"] < 5:
            time.sleep(0.05)
        processes[1].send_signal(signal.SIGINT)
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [EXIT_STOPPED] * 2, outputs
    assert "2 cpu devices in 2 processes" in outputs[0]
    assert "resuming from the checkpoint of step 2" in outputs[0]
    assert "loss" not in outputs[1]  # the first process prints for all
    step = newest_step(checkpoint_folder(two))
    assert f"stopped: stop signal received at step {step}; run the same command" in outputs[0]
    assert "stopped: " not in outputs[1]  # for all processes in one place
    assert "Traceback" not in outputs[0] + outputs[1]
    records = written(two)
    assert len(records[-1]["host_wait_by_process"]) == 2
    assert [record["step"] for record in records] == list(range(1, step + 1))
    np.testing.assert_allclose(losses(records[2:4]), losses(whole.records[2:]), rtol=2e-5)

    # One process resumes what two have saved.
    for path in checkpoint_folder(two).iterdir():
        if path.name != "4":
            shutil.rmtree(path)
    rest = run(changed(four, run={"steps": 5}))
    assert [record["step"] for record in rest] == [5]
    np.testing.assert_allclose(losses(rest), losses(records[4:5]), rtol=2e-5)


@pytest.mark.slow
def test_a_signal_before_the_first_step_stops_resumed_processes(whole, tmp_path):
    """All stop after the first step that they take, whatever its number."""
    config = changed(whole.copy("early"), audit={"interval": 0, "masks": ()})
    shutil.rmtree(checkpoint_folder(config) / "4")
    config = changed(
        config,
        run={"steps": 5000},
        sparsity={"kind": "dense"},
        parallel={"nodes": 1, "devices_per_node": 2, "cpu_devices": 1},
    )
    processes = started_together(config, tmp_path)
    try:
        assert any("compiling the training step" in line for line in processes[0].stdout)
        processes[1].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [EXIT_STOPPED] * 2, outputs
    assert "stopped: stop signal received at step 3; run the same command" in outputs[0]
    assert newest_step(checkpoint_folder(config)) == 3


@pytest.mark.slow
def test_folders_that_are_not_shared_are_refused(plain_config, tmp_path):
    """A relative path is another folder in each process, as one on a local disk of each host."""
    config = changed(
        plain_config, run={"output_dir": "runs"}, parallel={"devices_per_node": 2, "cpu_devices": 1}
    )
    program = tmp_path / "train.py"
    program.write_text(
        "import sys\n"
        "from mtraining_jax.cli.train import main\n"
        "from mtraining_jax.training.checkpoint import run_folder\n"
        "run_folder._FILE_SYSTEM_DELAY = 0\n"
        "sys.exit(main())\n"
    )
    processes = started_together(config, tmp_path, program=program)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], outputs
    (error,) = outputs[0].splitlines()  # once for both
    assert "error: lock file of runs/test (run.output_dir must be on a file system that" in error
    assert " in process 0 but null in process 1; it must be the same in all" in error
    assert not outputs[1]
    assert not any(path.is_dir() for path in tmp_path.glob("*/runs/*"))


def started_together(config, folder, arguments=((), ()), **program):
    """Processes of one run, with extra arguments for each; each has its own folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for number, further in enumerate(arguments):
        home = folder / str(number)
        home.mkdir()
        processes.append(
            start_process(
                config,
                home,
                f"--distributed.coordinator=127.0.0.1:{port}",
                f"--distributed.num_processes={len(arguments)}",
                f"--distributed.process_id={number}",
                *further,
                **program,
            )
        )
    return processes


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_process_without_the_others_says_so_at_the_end(config, tmp_path, number):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = start_process(
        config,
        tmp_path,
        f"--distributed.coordinator=127.0.0.1:{port}",
        "--distributed.num_processes=2",
        f"--distributed.process_id={number}",
        "--distributed.timeout_seconds=1",
    )
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    last = output.splitlines()[-1]
    assert last.startswith("error: the processes of the run"), output
    assert f"distributed.coordinator = 127.0.0.1:{port}" in last
    closed = f"127.0.0.1:{port} does not accept connections (Connection refused)"
    assert (closed in last) == (number == 1)
    assert not config.run.folder.exists()
