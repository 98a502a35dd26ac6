"""The check of a cluster, by all of its processes."""

import contextlib
import dataclasses
import signal
import time
from typing import Any

import jax

from mtraining_jax.config import Config
from mtraining_jax.tools.cluster.facts import facts_of_files, facts_of_process
from mtraining_jax.tools.cluster.rates import link_rates
from mtraining_jax.tools.cluster.verdict import hosts_at_fault, problems, table
from mtraining_jax.training.loop.watchdog import HangWatchdog
from mtraining_jax.training.processes import distributed
from mtraining_jax.training.processes.agreement import collect, run_on_process_0
from mtraining_jax.training.processes.peers import PeerWatch
from mtraining_jax.utils.console import Output
from mtraining_jax.utils.jax_platform import check_devices
from mtraining_jax.utils.signals import EXIT_FAILED, exit_immediately
from mtraining_jax.utils.text import counted

# Limits of the check, in seconds: to connect, of a measurement, and of silence of a process.
_CONNECT, _MEASUREMENT, _SILENCE = 40, 80, 20


def check(config: Config) -> int:
    """Measures and prints; returns the exit status, the same in all processes.

    Raises:
        UserError: if the processes cannot connect.
    """
    times = config.distributed
    times = dataclasses.replace(
        times,
        timeout_seconds=min(times.timeout_seconds, _CONNECT),
        heartbeat_timeout_seconds=min(times.heartbeat_timeout_seconds, _SILENCE),
    )
    with distributed.joined(times) as peers:
        if peers is not None:  # JAX's handler would wait for a step of training
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        check_devices()
        return _check(config, peers)


def _check(config: Config, peers: PeerWatch | None) -> int:
    def leave(sentence: str) -> None:
        if peers is not None:
            peers.announce(sentence)
        way = "test the network with NCCL_DEBUG=INFO, and the GPUs with nvidia-smi"
        exit_immediately(EXIT_FAILED, f"{sentence}; {way}")

    begin, console = time.monotonic(), Output(quiet=not distributed.is_first())
    limit = min(config.run.step_timeout_seconds, _MEASUREMENT)
    with contextlib.closing(HangWatchdog(limit, console.print, leave)) as watchdog:
        if peers is not None:
            peers.advice = lambda: "look at this process and its host, then check again"
            peers.status = lambda: {"progress": watchdog.progress, "phase": watchdog.phase()}
            watchdog.slowest = peers.slowest
        console.print(f"checking {counted(jax.process_count(), 'process')} ...")
        wait = 2 * limit  # for others, so that their own watchdog says what they do
        facts = facts_of_process(watchdog.watch, wait)
        facts |= facts_of_files(config, watchdog.watch, wait)
        every = collect(facts, wait)
        per_node = run_on_process_0(lambda: _measured_node(every, config), wait)
        if per_node:
            facts["links"] = link_rates(per_node, watchdog.watch, wait)
        every = collect(facts, wait)
        found = problems(every, config.devices, per_node or 1) if every else []
        count = run_on_process_0(lambda: len(found), wait)
    if every:
        console.width = max(console.width, 160)
        console.print(table(every))
    for problem in found:
        console.print(f"problem: {problem.sentence}")
    hosts = ", ".join(hosts_at_fault(every, found))
    verdict = counted(count, "problem") if count else "no problem found"
    where = f", on {hosts}" if hosts else ""
    console.print(f"verdict: {verdict}{where} ({time.monotonic() - begin:.0f} s)")
    return EXIT_FAILED if count else 0


def _measured_node(facts: list[dict[str, Any]], config: Config) -> int:
    """Devices of a node; 0 if a device fails or is missing, so that others would wait for it."""
    counts = [len(fact["devices"]) for fact in facts]
    failed = any("error" in rates for fact in facts for rates in fact["devices"])
    if failed or len(set(counts)) > 1:
        return 0
    wanted = config.parallel.devices_per_node
    return wanted if sum(counts) % wanted == 0 else counts[0]
