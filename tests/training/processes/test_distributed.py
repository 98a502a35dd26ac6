import contextlib
import itertools
import json
import queue
import time
import types

import pytest

from mtraining_jax.config.sections import DistributedConfig
from mtraining_jax.training.processes import agreement, distributed, peers
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.signals import EXIT_STOPPED

SLURM = {
    "SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "gpu[007-009],login",
    "SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}  # fmt: skip


@pytest.fixture
def joined(monkeypatch):
    """Records the calls to `jax.distributed.initialize`."""
    calls = []
    monkeypatch.setattr("jax.distributed.initialize", lambda **arguments: calls.append(arguments))
    return calls


def test_alone_without_a_scheduler_and_with_one_task(joined):
    config = DistributedConfig()
    for environment in (
        {},
        {**SLURM, "SLURM_NTASKS": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"},  # a batch script, outside of srun
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},  # a pod that is not part of an indexed job
        {"OMPI_COMM_WORLD_SIZE": "1"},
    ):
        assert not distributed.initialize(config, environment)
    assert not distributed.initialize(DistributedConfig(initialize="never"), SLURM)
    assert joined == []


def test_fields_come_first(joined):
    config = DistributedConfig(coordinator="a:1", num_processes=3, process_id=2, timeout_seconds=9)
    assert distributed.initialize(config, SLURM)
    (call,) = joined
    assert call.pop("initialization_timeout") > 9
    assert call == {
        "coordinator_address": "a:1",
        "num_processes": 3,
        "process_id": 2,
        "cluster_detection_method": "deactivate",
        "heartbeat_timeout_seconds": 110,
    }


@pytest.mark.parametrize(
    ("tasks", "visible", "ids"),
    [
        *((tasks, None, None) for tasks in ("1", "1,1(x3)")),  # uses all GPUs of its node
        *((tasks, None, [1]) for tasks in ("2,1", "1,2", "16(x2)", "1(x3),4")),
        *(("2(x2)", visible, None) for visible in ("3", "GPU-0a1b")),  # sees only its own
        ("2(x2)", "0,1", [1]),
    ],
)
def test_a_slurm_task_uses_its_gpus(joined, tasks, visible, ids):
    environment = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_LOCALID": "1"}
    if visible:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    assert distributed.initialize(DistributedConfig(), environment)
    (call,) = joined
    assert call.get("local_device_ids") == ids
    host, port = call["coordinator_address"].split(":")
    assert host == "gpu007" and 61440 <= int(port) < 65536
    assert (call["num_processes"], call["process_id"]) == (4, 2)


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("one", "one"),
        ("one,two", "one"),
        ("n[1-3]", "n1"),
        ("n[001,007-015],m", "n001"),
        ("n1,m[2-3]", "n1"),
        ("r[1-2]-ib,m", "r1-ib"),
    ],
)
def test_slurm_first_host(joined, nodes, first):
    distributed.initialize(DistributedConfig(), {**SLURM, "SLURM_STEP_NODELIST": nodes})
    assert joined[0]["coordinator_address"].startswith(f"{first}:")


def test_invalid_variables_are_named(joined):
    environment = {name: value for name, value in SLURM.items() if name != "SLURM_PROCID"}
    with pytest.raises(UserError, match="SLURM_PROCID"):
        distributed.initialize(DistributedConfig(), environment)
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        with pytest.raises(UserError, match=f"variable {name}=many must be a number of processes"):
            distributed.initialize(DistributedConfig(), {"SLURM_STEP_NODELIST": "n", name: "many"})
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    with pytest.raises(UserError, match="package kubernetes"):
        distributed.initialize(DistributedConfig(), pod)


def test_failure_is_one_message_with_its_source(monkeypatch):
    def fail(**arguments):
        raise RuntimeError("DEADLINE_EXCEEDED: nobody there\nand a stack trace")

    monkeypatch.setattr("jax.distributed.initialize", fail)
    with pytest.raises(UserError, match=r"\(SLURM\) could not connect: DEADLINE") as error:
        distributed.initialize(DistributedConfig(), SLURM)
    assert "\n" not in str(error.value)


def test_the_first_process_waits_for_all_others(monkeypatch):
    asked, sent = [], []

    def get(key, milliseconds):
        asked.append(key.rpartition("/")[2])
        assert milliseconds > 24 * 3600 * 1000 and not sent
        return "{}"

    store = types.SimpleNamespace(
        blocking_key_value_get=get, key_value_set=lambda key, text: sent.append(text)
    )
    monkeypatch.setattr(agreement.jax_distributed.global_state, "client", store)
    monkeypatch.setattr("jax.process_count", lambda: 3)
    monkeypatch.setattr("jax.process_index", lambda: 0)
    agreement.wait_for_all_processes()
    assert asked == ["1", "2"] and sent == ["done: null"]


def test_values_are_collected_from_each_process_in_order(monkeypatch):
    """Runs the three processes one after the other, with one key-value store."""
    texts = {}
    store = types.SimpleNamespace(
        key_value_set=texts.__setitem__,
        blocking_key_value_get=lambda key, _: texts.get(key, "done: null"),
    )
    monkeypatch.setattr(agreement.jax_distributed.global_state, "client", store)
    monkeypatch.setattr("jax.process_count", lambda: 3)

    def collected(process):
        monkeypatch.setattr(agreement, "_numbers", itertools.count())
        monkeypatch.setattr("jax.process_index", lambda: process)
        return agreement.collect({"of": process}, 9)

    assert [collected(2), collected(1)] == [[], []]
    assert collected(0) == [{"of": 0}, {"of": 1}, {"of": 2}]


def test_time_in_which_a_process_is_suspended_is_no_silence_of_others(monkeypatch):
    """The clock jumps, as after SIGCONT, while the counter of process 1 stands still."""
    texts, left = {f"{peers._COUNTERS}1": json.dumps({"count": 7})}, queue.Queue()
    times, now = [], [0.0]

    def monotonic():
        times.append(now[0])
        return now[0]

    store = types.SimpleNamespace(
        key_value_set=lambda key, text, allow_overwrite: texts.update({key: text}),
        key_value_dir_get=lambda prefix: [x for x in texts.items() if x[0].startswith(prefix)],
    )
    monkeypatch.setattr(peers.jax_distributed.global_state, "client", store)
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("jax.process_index", lambda: 0)
    clock = types.SimpleNamespace(monotonic=monotonic, sleep=lambda seconds: None)
    monkeypatch.setattr(peers, "time", clock)
    monkeypatch.setattr(peers, "_handle_abort", lambda handler: None)
    monkeypatch.setattr(peers, "exit_immediately", lambda *end: left.put(end))

    def rounds(count):
        last, give_up = len(times) + 2 * count, time.monotonic() + 30
        while len(times) < last and left.empty():
            assert time.monotonic() < give_up
            time.sleep(0.005)

    with contextlib.closing(peers.PeerWatch(0.08)) as watch:
        while 1 not in watch.statuses:
            time.sleep(0.005)
        rounds(2)
        now[0] += 1000
        rounds(3)
        assert left.empty()
        for _ in range(4):  # each time counts as two intervals, of an eighth of the limit
            now[0] += 1000
            rounds(3)
        status, text = left.get(timeout=30)
    assert status == EXIT_STOPPED and text.startswith("process 1 was lost: it did not answer for 0")
