"""Trains on a SLURM of one machine, and takes its nodes away: `python -m benchmarks.cluster.slurm`.

Needs root, and SLURM (`apt-get install slurmctld slurmd slurm-client munge`); takes minutes. Three
nodes are namespaces of this machine. The job is the batch script of docs/multi_host.md on two of
them. It is preempted by a job of higher priority, loses a node, is cancelled, and ends on one node.
Its losses are compared with those of an uninterrupted job. Exit status: 0, 1 after a failure, 77
where it cannot run.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.cluster.hosts import ROOT, Host, enter_namespaces, make_hosts, run
from benchmarks.result_file import read_lines
from benchmarks.soak.__main__ import CONFIG, CPU
from benchmarks.soak.process import make_data

_CONF = """\
ClusterName=test
SlurmctldHost=control
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%h
SlurmdPidFile={folder}/%h.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdLogFile={folder}/%h.log
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/linuxproc
SlurmdParameters=config_overrides
SlurmdTimeout=20
MpiDefault=none
MailProg=/bin/true
MessageTimeout=10
ReturnToService=2
SelectType=select/cons_tres
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=5,sched_interval=5
NodeName=node[1-3] CPUs=2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF
"""
_STEPS, _SAVE = 600, 50


class Job:
    """A job with the batch script of the documentation."""

    def __init__(self, folder: Path, name: str, nodes: int) -> None:
        self._folder, self._metrics = folder, folder / "runs" / name / "metrics.jsonl"
        page = (ROOT / "docs/multi_host.md").read_text()
        script = re.search(r"^```bash\n(#!/bin/bash\n.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
        options = (
            f"--config={folder}/config.toml --run.name={name} --parallel.nodes={nodes}"
            f" --parallel.devices_per_node={2 // nodes} --parallel.cpu_devices={2 // nodes}"
            " --distributed.heartbeat_timeout_seconds=15"
        )
        for pattern, new in (
            (r"^#SBATCH --(gpus|cpus|time|exclusive|output).*\n", ""),
            (r"^cd .*", f"cd {ROOT}"),
            (r"options=\([^)]*\)", f"options=({options})"),
            (r"\.venv/bin/python", sys.executable),
        ):
            script, count = re.subn(pattern, new, script, flags=re.MULTILINE)
            if not count:
                raise RuntimeError(f"no {pattern} in docs/multi_host.md")
        (path := folder / f"{name}-{nodes}.sbatch").write_text(script)
        limits = ["--ntasks-per-node=1", "--cpus-per-task=2", "--exclusive", "--export=ALL"]
        self.output = folder / f"{name}-{nodes}.out"
        output = f"--output={self.output}"
        self.id = run("sbatch", "--parsable", f"--nodes={nodes}", *limits, output, path).strip()
        self.begin = time.monotonic()

    def state(self) -> str:
        found = re.search(r"JobState=(\w+)", run("scontrol", "show", "job", self.id))
        return "" if found is None else found[1]

    def nodes(self) -> str:
        return run("squeue", "-h", "-j", self.id, "-o", "%N").strip()

    def restarts(self) -> int:
        return int(re.search(r"Restarts=(\d+)", run("scontrol", "show", "job", self.id))[1])

    def records(self) -> list[dict]:
        return read_lines(self._metrics)

    def step(self) -> int:
        return self.records()[-1]["step"] if self.records() else 0

    def said(self) -> str:
        """The last sentence about its end."""
        lines = self.output.read_text().splitlines() if self.output.exists() else []
        return ([x for x in lines if x.startswith(("stopped: ", "error: "))] or [""])[-1]


def start_slurm(folder: Path, hosts: list[Host]) -> None:
    """Starts SLURM's daemons, which write logs into the folder."""
    (folder / "slurm.conf").write_text(_CONF.format(folder=folder))
    (folder / "key").write_bytes(b"k" * 1024)
    (folder / "key").chmod(0o400)
    munge = [f"--{name}={folder}/munge.{name}" for name in ("socket", "pid-file", "log-file")]
    run("munged", "--force", f"--key-file={folder}/key", *munge, f"--seed-file={folder}/seed")
    os.environ["SLURM_CONF"] = f"{folder}/slurm.conf"
    for command in (["slurmctld", "-D"], *(host.command("slurmd", "-D") for host in hosts)):
        subprocess.Popen(command, stderr=subprocess.DEVNULL)
    idle = "sinfo", "-h", "-t", "idle", "-o", "%D"
    time.sleep(3)  # until it answers
    wait_for("idle nodes", lambda: run(*idle).strip() == "3", 60)


def wait_for(what: str, done: Callable[[], bool], seconds: float) -> float:
    """Waits; returns the seconds that it took."""
    begin = time.monotonic()
    while not done():
        if time.monotonic() - begin > seconds:
            raise TimeoutError(f"{what}: not within {seconds} s")
        time.sleep(0.2)
    return time.monotonic() - begin


def scenario(folder: Path, hosts: list[Host]) -> list[str]:
    """Runs the jobs; returns the rows of a table."""
    rows, whole = [], Job(folder, "whole", 2)
    wait_for("the end of the job", lambda: whole.state() == "COMPLETED", 600)
    rows.append(f"| start, {_STEPS} steps | COMPLETED | {time.monotonic() - whole.begin:.0f} | |")
    job = Job(folder, "stopped", 2)

    def event(what: str, until: int, act: Callable[[], object], state: str) -> None:
        wait_for(f"step {until}", lambda: job.step() >= until, 300)
        at, nodes, restarts = job.step(), job.nodes(), job.restarts()
        begin = time.monotonic()
        act()
        ended = wait_for(state, lambda: job.state() in state, 180)
        row = f"| {what} on {nodes} at step {at} | {job.state()} | {ended:.0f}"
        if state != "CANCELLED":
            wait_for("the restart", lambda: job.restarts() > restarts, 300)
            wait_for("steps", lambda: job.state() == "RUNNING", 300)
            row += f", running again after {time.monotonic() - begin:.0f} on {job.nodes()}"
        rows.append(f"{row} | {job.said().partition('; run')[0]} |")

    high = ["sbatch", "-p", "high", "-N3", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3"]
    event("preempted", 100, lambda: run(*high), "PENDING REQUEUED COMPLETING")

    def unplug() -> None:
        name = run("scontrol", "show", "hostnames", job.nodes()).split()[-1]
        next(host for host in hosts if host.name == name).unplug()

    event("lost the last node", 250, unplug, "PENDING REQUEUED COMPLETING")
    event("scancel", 400, lambda: run("scancel", job.id), "CANCELLED")
    job = Job(folder, "stopped", 1)
    wait_for("the end of the job", lambda: job.state() == "COMPLETED", 300)
    rows.append(f"| on one node | COMPLETED | {time.monotonic() - job.begin:.0f} | |")
    return [*rows, "", compare(whole.records(), job.records())]


def compare(whole: list[dict], stopped: list[dict]) -> str:
    """A sentence about the losses; raises AssertionError if they differ."""
    expected, found = (np.array([x["loss"] for x in records]) for records in (whole, stopped))
    assert [x["step"] for x in stopped] == [x["step"] for x in whole] == [*range(1, _STEPS + 1)]
    same = int(np.argmin(np.append(expected == found, False)))
    assert same >= 400, f"losses differ after step {same}"
    most = np.abs(found / expected - 1).max()
    assert most < 0.02, f"losses differ by {most}"
    return f"Losses are bit-identical in steps 1 to {same}; they differ by at most {most:.1e}."


def main() -> int:
    """Runs the script; returns its exit status."""
    enter_namespaces(["slurmctld", "slurmd", "munged"])
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        make_data(folder / "tokens.npy", 500_000, seed=0)
        text = CONFIG.format(
            steps=_STEPS, save=_SAVE, audit=0, kind="sampled_rows", out=folder, devices=1,
            data=folder / "tokens.npy", on_cpu="", **CPU,
        )  # fmt: skip
        (folder / "config.toml").write_text(text)
        hosts = make_hosts(["node1", "node2", "node3"], folder)
        start_slurm(folder, hosts)
        try:
            print("| event | state | seconds | said |", "|---|---|--:|---|", sep="\n")
            print(*scenario(folder, hosts), sep="\n")
        except Exception:
            for path in sorted(folder.glob("*.out")) + sorted(folder.glob("*.log")):
                print(f"--- {path.name}", path.read_text()[-3000:], sep="\n")
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
