"""Plants ten faults into hosts, and reads what the check of a cluster says of them.

    python -m benchmarks.cluster.faults

Needs root, takes minutes. Three hosts, each a namespace of this machine with one CPU process, run
`python -m mtraining_jax.check_cluster` once for each fault. Prints a table; the exit status is 1 if
a fault is not named within a minute, 77 where the script cannot run.
"""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cluster.hosts import Host, enter_namespaces, make_hosts, run

_LIMIT = 60.0  # seconds to the diagnosis
_CHECK = "import sys; from mtraining_jax import check_cluster; sys.exit(check_cluster.main())"
_WRONG_TIME = "import time; now = time.time; time.time = lambda: now() + 61\n"
_DEAD_GPU = """\
from mtraining_jax.tools.cluster import rates
def dead(*_):
    raise RuntimeError("CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered")
rates._products = dead
"""


class Fault(NamedTuple):
    """A fault of the last host.

    Attributes:
        name: in the table.
        sentence: regular expression of what the check has to say.
        plant: shell commands before the check, `restore` after it; `$on` runs one on the host, and
            `$port` is its port of the bridge.
        before: command before Python, such as prlimit.
        code: Python code before the check.
        processes: number of processes that are started.
    """

    name: str
    sentence: str
    plant: str = "true"
    restore: str = "true"
    before: tuple[str, ...] = ()
    code: str = ""
    processes: int = 3


def faults(folder: Path, port: int) -> list[Fault]:
    """The ten faults; commands and sentences name the folder and the port of process 0."""
    shared, at = folder / "shared", r"process 2 \(host3\)"
    slow = "root tbf rate 128kbit burst 16kbit latency 20s"
    to_port = f"ipproto tcp dport {port} prohibit"
    return [
        Fault("none", "verdict: no problem found"),
        Fault(
            "slow link: 128 kbit/s at one host",
            rf"all links between nodes are slow at node 2, {at}",
            f"$on tc qdisc add dev eth0 {slow} && tc qdisc add dev $port {slow}",
            "$on tc qdisc del dev eth0 root && tc qdisc del dev $port root",
        ),
        Fault(
            "missing mount of run.output_dir",
            rf"{at}: run.output_dir = .*: the folder that process 0 made there is missing",
            f"$on mount -t tmpfs none {shared}",
            f"$on umount {shared}",
        ),
        Fault(
            "another version of the package",
            rf"version of mtraining-jax is 0.0.1 in {at}",
            before=("env", f"PYTHONPATH={folder}/other"),
        ),
        Fault("clock 61 s ahead", rf"{at}: its clock is 61 s ahead", code=_WRONG_TIME),
        Fault(
            "a tenth of the free host memory",
            rf"{at}: [\d.]+ GiB of host memory are free",
            f"$on mount --bind {folder}/meminfo /proc/meminfo",
            "$on umount /proc/meminfo",
        ),
        Fault(
            "a process fewer than announced",
            "the processes of the run .* could not connect",
            processes=2,
        ),
        Fault(
            "blocked port of process 0",
            rf"could not connect: .*:{port} does not accept connections .* or the port is closed",
            f"$on ip rule add {to_port}",
            f"$on ip rule del {to_port}",
        ),
        Fault(
            "dead GPU: an error of the driver, emulated",
            rf"device 0 of {at} fails: CUDA_ERROR_ECC_UNCORRECTABLE",
            code=_DEAD_GPU,
        ),
        Fault(
            "read-only run.output_dir",
            rf"{at}: run.output_dir = .* is not writable \(Read-only file system\)",
            f"$on mount --bind {shared} {shared} && $on mount -o remount,bind,ro {shared}",
            f"$on umount {shared}",
        ),
        Fault(
            "300 open files",
            rf"{at}: only 300 files may be open; raise the limit with ulimit -n 512",
            before=("prlimit", "--nofile=300:300"),
        ),
    ]  # fmt: skip


def check(hosts: list[Host], fault: Fault, folder: Path, port: int) -> tuple[str, float, str]:
    """Runs the check with a fault; returns statuses, seconds and the output of all processes."""
    last = hosts[-1]
    shell = ["env", f"on={' '.join(last.command())}", f"port={last.port}", "sh", "-c"]
    run(*shell, fault.plant)
    begin, processes = time.monotonic(), []
    for number, host in enumerate(hosts[: fault.processes]):
        here = host is last
        command: list[Any] = [
            *(fault.before if here else ()), sys.executable, "-c", fault.code * here + _CHECK,
            "--config=tiny", f"--run.output_dir={folder}/shared/runs", "--parallel.cpu_devices=1",
            "--parallel.replicas=3", "--parallel.nodes=1", "--parallel.devices_per_node=1",
            "--data.batch_size=3",
            f"--distributed.coordinator={hosts[0].address}:{port}",
            "--distributed.num_processes=3", f"--distributed.process_id={number}",
        ]  # fmt: skip
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(host.command(*command), **output))
    outputs = [process.communicate(timeout=180)[0] for process in processes]
    seconds = time.monotonic() - begin
    run(*shell, fault.restore)
    return ", ".join(str(x.returncode) for x in processes), seconds, "\n".join(outputs)


def main() -> int:
    """Runs the script; returns its exit status."""
    enter_namespaces(["tc", "prlimit"])
    failed = 0
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "shared").mkdir()
        (package := folder / "other/mtraining_jax-0.0.1.dist-info").mkdir(parents=True)
        (package / "METADATA").write_text("Name: mtraining-jax\nVersion: 0.0.1\n")
        memory = Path("/proc/meminfo").read_text()
        available = int(re.search(r"MemAvailable: *(\d+)", memory)[1])
        memory = memory.replace(f"{available} kB", f"{available // 10} kB")
        (folder / "meminfo").write_text(memory)
        hosts = make_hosts(["host1", "host2", "host3"], folder)
        print("| fault | seconds | statuses | sentence |", "|---|--:|---|---|", sep="\n")
        for fault in faults(folder, port := 61000):
            statuses, seconds, output = check(hosts, fault, folder, port)
            found = re.search(f"^.*{fault.sentence}.*$", output, re.MULTILINE)
            sentence = "**not named**" if found is None else found[0].replace(str(folder), "")
            print(f"| {fault.name} | {seconds:.0f} | {statuses} | {sentence} |", flush=True)
            if found is None or seconds > _LIMIT or "Traceback" in output:
                failed = 1
                print(output, file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(main())
