"""Connects the processes of a run, before JAX touches a device."""

import contextlib
import importlib.util
import os
import re
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax
from jax._src import distributed as jax_distributed  # its service has no public name

from mtraining_jax.config.sections import DistributedConfig
from mtraining_jax.training.processes.peers import PeerWatch
from mtraining_jax.utils.errors import UserError, print_error
from mtraining_jax.utils.printable import print_message
from mtraining_jax.utils.signals import EXIT_FAILED, Stopped, exit_immediately

# Transports of collectives between processes, as errors name them.
_TRANSPORTS = ("Gloo", "NCCL")
# SLURM_STEP_TASKS_PER_NODE if no node has more than one task.
_ONE_TASK_A_NODE = re.compile(r"1(\(x\d+\))?(,1(\(x\d+\))?)*")
# The first name of a SLURM node list, such as node[001-004,7]-ib,login: prefix, number and suffix.
_FIRST_HOST = re.compile(r"([^,[]*)(?:\[(\w+)[^]]*\])?([^,]*)")
_ONE_GPU = re.compile(r"[^,\s]+")  # CUDA_VISIBLE_DEVICES of a task with one GPU
# Seconds that a process with an error waits for the others to reach the same error.
_PATIENCE = 20
# Seconds of waiting at startup after which a process prints what it waits for.
_SAY_AFTER = 5


@contextlib.contextmanager
def joined(config: DistributedConfig) -> Iterator[PeerWatch | None]:
    """Joins the other processes, if any, for the block, and watches them; None without others.

    The end of the block disconnects the processes, and an error in it ends all of them.
    """
    peers = PeerWatch(config.heartbeat_timeout_seconds) if initialize(config) else None
    try:
        yield peers
    except (UserError, Stopped) as reason:
        if peers is not None:
            shutdown(peers, reason)
        raise
    except Exception as error:
        if peers is not None:
            abort(peers, error)
        raise
    if peers is not None:
        shutdown(peers)


def initialize(config: DistributedConfig, environment: Mapping[str, str] = os.environ) -> bool:
    """Joins the other processes of the run, if there are any, and returns whether there are.

    Sources, in order: the three fields of the configuration; a SLURM step (`srun`) with several
    tasks; Open MPI (`mpirun`) with several processes; an indexed Kubernetes job. Without any of
    them, the process runs alone. After joining, open a `PeerWatch`, and call `shutdown` at the end
    or `abort` after an error.

    A single SLURM task per node uses all GPUs of its node. With several SLURM tasks per node, or
    with Open MPI, each process uses the GPU of its local rank. Otherwise, and for SLURM tasks that
    see a single GPU each (`--gpus-per-task=1`), every process uses the GPUs that it sees.

    Raises:
        UserError: if the others cannot be reached within `config.timeout_seconds`, or the
            variables of a scheduler are invalid.
    """
    if config.initialize == "never" or (source := _find(config, environment)) is None:
        return False
    how, arguments = source
    timeout, failed = config.timeout_seconds, []

    def join() -> None:
        try:
            jax.distributed.initialize(
                # JAX aborts the process at its own timeout, so ours must be shorter.
                initialization_timeout=timeout + 60,
                # `PeerWatch` notices a lost process earlier, and says which one.
                heartbeat_timeout_seconds=config.heartbeat_timeout_seconds + 60,
                **arguments,
            )
        except Exception as error:
            failed.append(error)

    waits = (
        f"waiting up to {timeout} s (distributed.timeout_seconds) for the other processes of the "
        f"run ({how}) ..."
    )
    message = threading.Timer(_SAY_AFTER, print_message, [waits])
    thread = threading.Thread(target=join, daemon=True)
    message.start()
    thread.start()
    reason = None
    try:
        thread.join(timeout)
        if thread.is_alive():
            reason = f"no answer within {timeout} s (distributed.timeout_seconds)"
        elif failed:
            reason = _first_line(failed[0])
        else:
            return True
    finally:
        message.cancel()
        service = jax_distributed.global_state.service
        if service is not None and (reason is not None or thread.is_alive()):
            service.shutdown()  # at the end of the process it would log after our message
    raise UserError(
        f"the processes of the run ({how}) could not connect: {reason}; check that all of them "
        f"are running and that every host can reach process 0{_reached(arguments)}"
    ) from next(iter(failed), None)


def _reached(arguments: Mapping[str, Any]) -> str:
    """Whether process 0 accepts connections, as the end of a message."""
    address = arguments.get("coordinator_address")
    if address is None or arguments["process_id"] == 0:
        return ""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except OSError as error:
        what = f"{address} does not accept connections ({error.strerror or error})"
        return f": {what}, so process 0 does not run there, or the port is closed"
    return f": {address} accepts connections, so another process is missing"


def shutdown(peers: PeerWatch, reason: UserError | Stopped | None = None) -> None:
    """Disconnects from the other processes; all of them wait for one another, and `peers` watches.

    If a run ends early, most reasons reach all processes: they meet here, and process 0 prints it.
    Otherwise this process prints its reason and ends the others.
    """
    if reason is not None:
        _wait_if_collective_failed(peers, reason.__cause__)
    leaving = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    leaving.start()
    leaving.join(_PATIENCE if isinstance(reason, UserError) else None)
    if leaving.is_alive():
        status = print_error(UserError(str(reason)))
        peers.announce(str(reason))
        _exit(status)
    peers.close()
    if reason is not None:
        reason.printed = peers.number > 0


def abort(peers: PeerWatch, error: Exception) -> NoReturn:
    """Ends this process, and the others too, after an error that they do not share.

    The others wait for this process in a collective, so it must not wait for them like `shutdown`.
    """
    _wait_if_collective_failed(peers, error)
    traceback.print_exception(error)
    peers.announce(_first_line(error))
    _exit(EXIT_FAILED)


def _wait_if_collective_failed(peers: PeerWatch, error: BaseException | None) -> None:
    """Lets `peers` find out which process ended, if a collective failed because of that."""
    while error is not None and not any(name in str(error) for name in _TRANSPORTS):
        error = error.__cause__ or error.__context__
    if error is not None:
        peers.wait_for_verdict()
        failed = f"a collective between the processes of the run failed ({_first_line(error)})"
        exit_immediately(EXIT_FAILED, f"{failed}; {peers.advice()}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _exit(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def is_first() -> bool:
    """Whether this is the process that prints and writes metrics."""
    return jax.process_index() == 0


def _find(
    config: DistributedConfig, environment: Mapping[str, str]
) -> tuple[str, dict[str, Any]] | None:
    """Returns the source of the process list, and arguments of `jax.distributed.initialize`."""
    if config.coordinator is not None:
        return f"distributed.coordinator = {config.coordinator}", dict(
            coordinator_address=config.coordinator,
            num_processes=config.num_processes,
            process_id=config.process_id,
            cluster_detection_method="deactivate",
        )
    # Set by srun for each task, and absent from a batch script.
    if "SLURM_STEP_NODELIST" in environment and _count(environment, "SLURM_NTASKS") > 1:
        return "SLURM", _slurm(environment)
    if _count(environment, "OMPI_COMM_WORLD_SIZE") > 1:
        return "Open MPI", dict(cluster_detection_method="ompi")
    # Every pod has KUBERNETES_SERVICE_HOST; only pods of an indexed job have an index.
    if not {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys():
        return None
    if importlib.util.find_spec("kubernetes") is None:
        raise UserError(
            "this pod belongs to an indexed Kubernetes job, but the package kubernetes (jax[k8s]) "
            "that finds the other pods is not installed; install it, or set "
            "distributed.coordinator, distributed.num_processes and distributed.process_id, or set "
            "distributed.initialize=never to run alone"
        )
    return "Kubernetes", dict(cluster_detection_method="k8s")


def _count(environment: Mapping[str, str], name: str) -> int:
    """Returns a number of processes from the environment; 1 without the variable."""
    text = environment.get(name, "1")
    if not text.isdecimal():
        raise UserError(
            f"environment variable {name}={text} must be a number of processes; set "
            "distributed.initialize=never to run alone"
        )
    return int(text)


def _slurm(environment: Mapping[str, str]) -> dict[str, Any]:
    try:
        # One of 4096 high ports, a different one for each step of each job.
        job, step = int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_STEP_ID", "0"))
        first_host = "".join(_FIRST_HOST.findall(environment["SLURM_STEP_NODELIST"])[0])
        arguments: dict[str, Any] = dict(
            coordinator_address=f"{first_host}:{61440 + (job + step) % 4096}",
            num_processes=int(environment["SLURM_NTASKS"]),
            process_id=int(environment["SLURM_PROCID"]),
            cluster_detection_method="deactivate",
        )
        # "1(x4)": one task on each of 4 nodes; "2,1": two and one; "16(x2)": 16 on each of two.
        one_task = _ONE_TASK_A_NODE.fullmatch(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
        # A task that is bound to one GPU sees it as device 0, whatever its local rank.
        if not one_task and not _ONE_GPU.fullmatch(environment.get("CUDA_VISIBLE_DEVICES", "")):
            arguments["local_device_ids"] = [int(environment["SLURM_LOCALID"])]
    except (KeyError, ValueError) as error:
        raise UserError(
            f"the SLURM variables are not as srun sets them ({error}); start the run with srun, "
            "or set distributed.initialize=never to run alone"
        ) from error
    return arguments
