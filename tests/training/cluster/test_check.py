"""The check of a cluster, on healthy processes and on planted faults."""

import contextlib
import io
import itertools
import socket
import threading
import types

import jax
import pytest
from jax import lax
from rich.console import Console

from mtraining_jax.tools.cluster import check as cluster_check
from mtraining_jax.tools.cluster import facts as cluster_facts
from mtraining_jax.tools.cluster import rates, verify
from mtraining_jax.tools.cluster.check import check
from mtraining_jax.tools.cluster.rates import rounds_of_pairs
from mtraining_jax.tools.cluster.verdict import hosts_at_fault, problems, table
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.signals import EXIT_FAILED
from tests.training.common import changed, run, tiny_config
from tests.training.processes.test_processes import started_together

RATES = {
    "matmul": 7e14, "memory": 4e12, "from_host": 5e10, "passes": 9, "wrong": 0, "attention": [11],
}  # fmt: skip


def healthy(processes=4, devices=2):
    """Facts of hosts with GPUs of one node each."""
    links = []
    for a in range(processes * devices):
        node, place = divmod(a, devices)
        links += [("pair", a, node * devices + b, 3e11) for b in range(devices) if b != place]
        others = (n for n in range(processes) if n != node)
        links += [("pair of nodes", a, n * devices + place, 4e10) for n in others]
    return [
        {
            "clock": 1e9 + 0.1 * number,
            "host": f"host{number}",
            "same": {"version of jax": "0.11.2", "NCCL_DEBUG": "WARN"},
            "kinds": ["NVIDIA H200"] * devices,
            "devices": [{**RATES} for _ in range(devices)],
            "memory": 2**40,
            "open_files": 65536,
            "data": "3 files of 1,000 bytes",
            "seen": 0.1,
            "write": 1e9,
            "errors": [],
            "links": [link for link in links if link[1] // devices == number],
        }
        for number in range(processes)
    ]


def sentences(facts, needed=8, per_node=2):
    return [problem.sentence for problem in problems(facts, needed, per_node)]


def slow_links(facts, ends, rate):
    for fact in facts:
        fact["links"] = [
            (kind, a, b, rate if ends & {a, b} and kind == "pair of nodes" else usual)
            for kind, a, b, usual in fact["links"]
        ]


def test_a_healthy_cluster_has_no_problem():
    assert problems(healthy(), 8, 2) == []
    assert problems(healthy(1, 8), 8, 8) == []
    printed = io.StringIO()
    Console(file=printed, width=200).print(table(healthy()))
    row = printed.getvalue().splitlines()[-1].split()
    assert row[:3] == ["3", "host3", "2"] and row[5:8] == ["700", "4e+03", "50"]
    assert "300" in row and "40" in row and "+0.30" in row and row[-2:] == ["1024", "65536"]


HOST = [
    ({"clock": 1e9 + 61}, "process 2 (host2): its clock is 61 s ahead of the others; sync"),
    ({"memory": 2**38}, "256.0 GiB of host memory are free, 1024.0 elsewhere; end other"),
    ({"open_files": 256}, "process 2 (host2): only 256 files may be open; raise the limit"),
    ({"same": {"version of jax": "0.11.3", "NCCL_DEBUG": "WARN"}}, "version of jax is 0.11.3"),
    ({"same": {"version of jax": "0.11.2"}}, "NCCL_DEBUG is None in process 2 (host2) and WA"),
    ({"errors": ["/x is read-only"]}, "process 2 (host2): /x is read-only"),
    ({"data": "2 files"}, "data.paths is 2 files in process 2 (host2) and 3 files of 1,000"),
]
DEVICE = [
    ({"error": "CUDA_ERROR_ECC"}, "device 1 of process 2 (host2) fails: CUDA_ERROR_ECC"),
    ({"wrong": 2}, "device 1 of process 2 (host2) computes wrong products, in 2 of 9 passes"),
    ({"attention": [12]}, "device 1 of process 2 (host2) computes other attention than most; "),
    ({"attention": [11, 12]}, "device 1 of process 2 (host2) has 2 results of the same at"),
    ({"memory": 2e12}, "device 1 of process 2 (host2) is slow in copies in its memory: 2e+03"),
    ({"from_host": 9e9}, "slow in copies from the host: 9 GB/s, 50 in the median"),
    ({"matmul": 4.5e14}, "is slow in matrix products: 450 TFLOP/s, 700 in the median"),
]


@pytest.mark.parametrize(
    ("fault", "sentence", "of_device"),
    [*((*case, False) for case in HOST), *((*case, True) for case in DEVICE)],
)
def test_a_fault_is_named(fault, sentence, of_device):
    facts = healthy()
    (facts[2]["devices"][1] if of_device else facts[2]).update(fault)
    (found,) = problems(facts, 8, 2)
    assert sentence in found.sentence
    assert hosts_at_fault(facts, [found]) == ["host2"]


def test_limits_of_a_host_and_a_device():
    facts = healthy()
    facts[2] |= {"clock": 1e9 + 2.05, "memory": 2**39, "open_files": 512}
    facts[1]["devices"][1] |= {"memory": 2.8e12, "from_host": 2e10}  # 70 % and 40 %
    assert sentences(facts) == []
    facts[2] |= {"clock": 1e9 + 2.15, "memory": 2**39 - 1, "open_files": 511}
    facts[1]["devices"][1] |= {"memory": 2.7e12, "from_host": 1.9e10}
    found = problems(facts, 8, 2)
    assert [x.processes for x in found] == [(2,)] * 3 + [(1,)] * 2
    assert found[0].sentence.startswith("process 2 (host2): its clock is 2 s ahead of the others")


def test_a_node_of_three_is_named_by_its_links():
    facts = healthy(3)
    slow_links(facts, {4, 5}, 5e9)
    (found,) = problems(facts, 6, 2)
    assert found.sentence.startswith("all links between nodes are slow at node 2, process 2 (")
    assert found.processes == (2,)


def test_devices_that_disagree_and_links_that_change_data_are_named():
    facts = healthy(1, 2)
    facts[0]["devices"][1]["attention"] = [12]
    facts[0]["links"].append(("wrong", 1, 0, 0.0))
    assert sentences(facts, 2, 2) == [
        "devices compute different attention, and there is no majority; one of them is faulty",
        "the link from device 1 (process 0 (host0)) to device 0 (process 0 (host0)) changes data; "
        "do not use it",
    ]


def test_devices_that_are_slow_together_are_measured_by_their_peak_rate():
    facts = healthy(1, 1)
    facts[0]["devices"][0]["matmul"] = 1e14
    (found,) = sentences(facts, 1, 1)
    assert "reaches 10% of its peak rate in matrix products; look for other programs" in found


def test_missing_processes_and_devices_are_named():
    (found,) = sentences(healthy(1))
    assert found.startswith("the mesh under [parallel] needs 8 devices, but there are 2 in 1 proc")
    facts = healthy()
    for name in ("kinds", "devices"):
        facts[2][name].pop()
    few, wrong = sentences(facts)
    assert few == "process 2 (host2) has 1 device; most others have 2"
    assert "needs 8 devices, but there are 7 in 4 processes" in wrong


def test_slow_links_are_named_by_their_node_if_all_of_it_are_slow():
    facts = healthy()
    slow_links(facts, {4, 5}, 5e9)
    (found,) = sentences(facts)
    assert found == (
        "all links between nodes are slow at node 2, process 2 (host2): 5 GB/s, 40 in the median"
    )
    facts = healthy()
    slow = [("pair of nodes", 0, 6, 5e9)], [("pair of nodes", 6, 0, 4e9)]
    for fact, links in zip((facts[0], facts[3]), slow, strict=True):
        fact["links"] = links + [x for x in fact["links"] if {x[1], x[2]} != {0, 6}]
    (found,) = sentences(facts)
    assert found.startswith("the link of device 0 (process 0 (host0)) and device 6 (process 3 (")
    assert found.endswith("is slow: 5 GB/s, 40 in the median")
    facts = healthy()
    slow_links(facts, set(range(8)), 1e9)
    (found,) = sentences(facts)
    assert found.startswith("nodes exchange 1 GB/s per device, as over TCP; name the fast network")
    facts = healthy(1, 8)
    facts[0]["links"] = [(k, a, b, 2e10 if 5 in (a, b) else x) for k, a, b, x in facts[0]["links"]]
    (found,) = sentences(facts, 8, 8)
    assert found.startswith("all links between GPUs of a node are slow at device 5, process 0")


def test_pairs_meet_once():
    for number in range(2, 10):
        rounds = rounds_of_pairs(number)
        assert all(partners[x] == i for partners in rounds for i, x in enumerate(partners))
        pairs = [(i, x) for partners in rounds for i, x in enumerate(partners) if i < x]
        assert sorted(pairs) == [(i, x) for i in range(number) for x in range(i + 1, number)]


def test_rates_of_a_device_are_its_work_over_the_shortest_time(monkeypatch):
    # Four times of each: 9 s to compile, then 3, 2 and 5 s.
    ticks = itertools.accumulate(itertools.cycle([1, 9, 1, 3, 1, 2, 1, 5]))
    monkeypatch.setattr(rates, "time", types.SimpleNamespace(perf_counter=lambda: next(ticks)))
    # On a CPU: two products of 128 x 128, two times 1 MiB read and written, 256 KiB moved.
    assert rates.rates_of_device(jax.devices()[0]) == {
        "matmul": 2 * 2 * 128**3 / 2, "memory": 2 * 2 * 2**20 / 2, "from_host": 2**18 / 2
    }  # fmt: skip


def test_rates_of_links_are_of_pairs_and_rings_within_and_between_nodes(monkeypatch):
    """Two nodes of 4 devices; the second measurement of device 5 is slower."""
    exchanged, watched, size = [], [], 2**14

    def exchange(devices, to, size_of_one, timeout):
        exchanged.append(list(to))
        assert devices == jax.devices() and (size_of_one, timeout) == (size, 9)
        calls = iter([1, 1, 3])

        def seconds(repeats):
            slower = next(calls)
            return {i: 0.01 * repeats * (slower if i == 5 else 1) for i in range(8)}

        return seconds, lambda: [(to.index(6), 6)] if len(exchanged) == 2 else []

    monkeypatch.setattr(rates, "_exchange", exchange)
    found = rates.link_rates(
        4, lambda name: contextlib.nullcontext(watched.append(name)), timeout=9
    )
    pairs, nodes = [exchanged[:3], exchanged[4:5]]
    assert all(to[to[i]] == i != to[i] and to[i] // 4 == i // 4 for to in pairs for i in range(8))
    assert sorted(to[5] for to in pairs) == [4, 6, 7]
    assert exchanged[3] == [1, 2, 3, 0, 5, 6, 7, 4]
    assert nodes == [[4, 5, 6, 7, 0, 1, 2, 3]] == exchanged[5:]
    kinds = ["pair"] * 3 + ["ring", "pair of nodes", "ring of nodes"]
    assert [x for x in found if x[0] != "wrong"] == [
        (kind, i, to[i], pytest.approx(size / 0.01))
        for kind, to in zip(kinds, exchanged, strict=True)
        for i in range(8)
    ]
    assert [x for x in found if x[0] == "wrong"] == [("wrong", exchanged[1].index(6), 6, 0.0)]
    assert watched == [f"{kind}, transfer {i} of 4" for i, kind in enumerate(kinds[:4], 1)] + [
        f"{kind}, transfer {i} of 2" for i, kind in enumerate(kinds[4:], 1)
    ]


@pytest.fixture
def four(tmp_path, monkeypatch):
    """Two nodes of two devices, which are all that this process has."""
    devices = jax.devices()[:4]
    for name in ("devices", "local_devices"):
        monkeypatch.setattr(jax, name, lambda *_: devices)
    return tiny_config(tmp_path, parallel={"nodes": 2, "devices_per_node": 2})


def test_a_healthy_process_is_checked(four, tmp_path, capsys):
    assert check(four) == 0
    printed = capsys.readouterr().out
    assert "verdict: no problem found" in printed and "4 cpu" in printed
    assert not list(tmp_path.glob("runs/*"))


def test_links_are_not_measured_if_a_device_fails(four, monkeypatch, capsys):
    def measure(device):
        return {"error": "ECC"} if device.id == 3 else {**RATES}

    monkeypatch.setattr(cluster_facts, "rates_of_device", measure)
    monkeypatch.setattr(cluster_check, "link_rates", lambda *_: pytest.fail("it would hang"))
    assert check(four) == EXIT_FAILED
    printed = capsys.readouterr().out
    assert f"problem: device 3 of process 0 ({socket.gethostname()}) fails: ECC\n" in printed
    assert "verdict: 1 problem, on" in printed


def test_files_are_written_to_measure_a_rate(tmp_path):
    found = cluster_facts.facts_of_files(
        tiny_config(tmp_path), lambda name: contextlib.nullcontext(), 9
    )
    assert found["write"] > 1e4 and found["data"] == "1 file of 40,130 bytes"


def test_data_that_cannot_be_read_is_a_problem(four, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cluster_facts, "rates_of_device", lambda device: {"error": "ECC"})
    (tmp_path / "tokens.npy").unlink()
    assert check(four) == EXIT_FAILED
    found = f"problem: process 0 ({socket.gethostname()}): data.paths: "
    assert found in capsys.readouterr().out


def test_a_measurement_that_hangs_ends_the_check(four, monkeypatch):
    ended, left = threading.Event(), []

    def leave(*end):
        left.append(end)
        ended.set()

    def hangs(device):
        assert ended.wait(30)
        return {"error": "ECC"}

    monkeypatch.setattr(cluster_facts, "rates_of_device", hangs)
    monkeypatch.setattr(cluster_check, "exit_immediately", leave)
    monkeypatch.setattr(cluster_check, "_MEASUREMENT", 1)
    assert check(four) == EXIT_FAILED
    assert left[0][0] == EXIT_FAILED and left[0][1].endswith("and the GPUs with nvidia-smi")


@pytest.mark.slow
def test_faults_of_devices_are_found_before_training(config, monkeypatch):
    config = changed(config, parallel={"nodes": 1, "devices_per_node": 2}, guard={"verify": True})
    config = changed(config, run={"steps": 1}, sparsity={"kind": "dense"})
    ppermute, wrong_elements = lax.ppermute, verify._wrong_elements

    def wrong_on_device_1(width, right):
        (device,) = right.devices()
        return wrong_elements(width, right + (device.id == 1))

    monkeypatch.setattr(verify, "_wrong_elements", wrong_on_device_1)

    def changed_data(x, *args):
        moved = ppermute(x, *args)
        return moved.at[0].add((lax.axis_index("x") == 1).astype(moved.dtype))

    monkeypatch.setattr(lax, "ppermute", changed_data)
    with pytest.raises(UserError) as caught:
        run(config)
    where = f"process 0 ({socket.gethostname()})"
    assert str(caught.value) == (
        f"device 1 of {where} computes wrong products, in 2 of 2 passes; do not use it; "
        + "; ".join(
            f"the link from device {x} ({where}) to device 1 ({where}) changes data; do not use it"
            for x in (0, 7, 5, 3)
        )
    )
    monkeypatch.undo()
    assert len(run(config)) == 1


# A fault in each place that a process looks at; process 1 has most of them.
FAULTY = """
import os, resource, sys, time
from mtraining_jax import check_cluster
from mtraining_jax.tools.cluster import facts, rates

resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
if "--distributed.process_id=1" in sys.argv:
    os.environ["NCCL_DEBUG"] = "INFO"
    now, free = time.time, facts.free_host_memory
    facts.time.time = lambda: now() + 100
    facts.free_host_memory = lambda: free() // 4
exchange = rates._exchange

def slow_at_3(devices, to, *others):
    run, wrong = exchange(devices, to, *others)
    return lambda x: {i: s * 1e5 ** (3 in (i, to[i])) for i, s in run(x).items()}, wrong

rates._exchange = slow_at_3
facts._FILE_SYSTEM_DELAY = 0.1
sys.exit(check_cluster.main())
"""


@pytest.mark.slow  # each is named above, from facts
def test_faults_of_a_process_are_diagnosed(tmp_path):
    config = tiny_config(
        tmp_path,
        run={"output_dir": "runs"},  # another folder in each process, as on local disks
        parallel={"nodes": 2, "devices_per_node": 1, "cpu_devices": 2},
    )
    (program := tmp_path / "faulty.py").write_text(FAULTY)
    processes = started_together(config, tmp_path, program=program)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [EXIT_FAILED] * 2, outputs
    found = [line for line in outputs[0].splitlines() if line.startswith("problem: ")]
    name = socket.gethostname()
    for text in (
        "the mesh under [parallel] needs 2 devices, but there are 4 in 2 processes",
        f"NCCL_DEBUG is INFO in process 1 ({name}) and None in most others",
        f"process 1 ({name}): run.output_dir = runs: the folder that process 0 made there is mi",
        f"process 1 ({name}): its clock is 100 s ahead of the others",
        f"process 0 ({name}): only 300 files may be open; raise the limit with ulimit -n 512",
        f"all links between nodes are slow at node 3, process 1 ({name}): ",
    ):
        assert any(text in line for line in found), (text, outputs[0])
    assert "GiB of host memory are free" in outputs[0]
    assert f"verdict: {len(found)} problems, on {name}" in outputs[0]
    assert "Traceback" not in outputs[0] + outputs[1] and "verdict" not in outputs[1]
