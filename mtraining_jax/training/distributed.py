"""How the processes of a run find each other, before JAX touches a device."""

import importlib.util
import os
import re
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import NoReturn

import jax

from mtraining_jax.config import DistributedConfig
from mtraining_jax.errors import UserError

# Transports of collectives between processes, as they are named in errors.
_TRANSPORTS = ("Gloo", "NCCL")
# How SLURM says that no node of a step has more than one task.
_ONE_TASK_A_NODE = re.compile(r"1(\(x\d+\))?(,1(\(x\d+\))?)*")
# Seconds that a process with an error waits for others to have the same.
_PATIENCE = 20
# Seconds after which a process that waits for the others at the start says so.
_SAY_AFTER = 5


def initialize(config: DistributedConfig, environment: Mapping[str, str] = os.environ) -> bool:
    """Joins the processes of the run, if it has several.

    In this order: the three fields of the configuration; the steps of SLURM (`srun`) with several
    tasks; Open MPI (`mpirun`) with several processes; an indexed Kubernetes job. Elsewhere the
    process runs alone.

    One SLURM task on a node takes all its GPUs; of several, each takes the one of its local
    number, as do the processes of Open MPI. In the other cases every process takes the GPUs that
    it sees.

    Args:
        config: the `distributed` section.
        environment: variables of the process.

    Returns:
        Whether other processes were joined: `shutdown` is then due at the end, or `leave` after
        an error. From here on JAX ends this process with a message when another one has not been
        heard of for `config.heartbeat_timeout_seconds`, whatever this one is waiting for.

    Raises:
        UserError: if the others cannot be reached in `config.timeout_seconds`, or a scheduler's
            variables do not make sense.
    """
    if config.initialize == "never":
        return False
    how, arguments = _find(config, environment)
    if arguments is None:
        return False
    arguments["heartbeat_timeout_seconds"] = config.heartbeat_timeout_seconds
    _join(how, arguments, config.timeout_seconds)
    return True


def _join(how: str, arguments: dict[str, object], timeout: int) -> None:
    # JAX aborts the process when its own time is up, so ours has to end first.
    failed: list[Exception] = []

    def initialize() -> None:
        try:
            jax.distributed.initialize(initialization_timeout=timeout + 60, **arguments)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=initialize, daemon=True)
    thread.start()
    thread.join(min(timeout, _SAY_AFTER))
    if thread.is_alive() and timeout > _SAY_AFTER:
        print(
            f"waiting for the other processes of the run ({how}), at most "
            f"distributed.timeout_seconds = {timeout} ...",
            file=sys.stderr,
            flush=True,
        )
        thread.join(timeout - _SAY_AFTER)
    if thread.is_alive():
        reason = f"no answer within distributed.timeout_seconds = {timeout}"
    elif failed:
        reason = (str(failed[0]).strip() or type(failed[0]).__name__).splitlines()[0][:200]
    else:
        return
    raise UserError(
        f"the processes of the run ({how}) did not find each other: {reason}; check that all of "
        "them run and that process 0 can be reached from every host"
    ) from (failed[0] if failed else None)


def shutdown(reason: BaseException | None = None) -> None:
    """Leaves the other processes in good order; they wait for one another.

    Args:
        reason: why the run ends early, if it does. Most reasons are those of all processes, which
            then meet here. Where they do not, this process says its reason and ends alone.
    """
    if reason is None:
        jax.distributed.shutdown()
        return
    leaving = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    leaving.start()
    leaving.join(_PATIENCE)
    if leaving.is_alive():
        for line in str(reason).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2)


def leave(error: Exception) -> NoReturn:
    """Ends this process at once after an error that the others do not share, and says why.

    They wait for this process in a collective, so it must not wait for them as `shutdown` does.
    They notice by themselves that it is gone. If a collective failed because another process ended,
    one sentence says so; any other error is shown with its traceback.
    """
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    if any(name in reason for name in _TRANSPORTS):
        print(
            f"error: another process of the run went away while this one worked with it "
            f"({reason}); its own output says why",
            file=sys.stderr,
        )
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def is_first() -> bool:
    """Whether this is the process that prints and writes metrics."""
    return jax.process_index() == 0


def _find(
    config: DistributedConfig, environment: Mapping[str, str]
) -> tuple[str, dict[str, object] | None]:
    """What says that there are other processes, and arguments of `jax.distributed.initialize`."""
    if config.coordinator is not None:
        return f"distributed.coordinator = {config.coordinator}", dict(
            coordinator_address=config.coordinator,
            num_processes=config.num_processes,
            process_id=config.process_id,
            cluster_detection_method="deactivate",
        )
    # Set by srun for each task, and absent from a batch script around it.
    if "SLURM_STEP_NODELIST" in environment and _count(environment, "SLURM_NTASKS") > 1:
        return "SLURM", _slurm(environment)
    if _count(environment, "OMPI_COMM_WORLD_SIZE") > 1:
        return "Open MPI", dict(cluster_detection_method="ompi")
    # Every pod has KUBERNETES_SERVICE_HOST; only those of an indexed job have a number.
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        if importlib.util.find_spec("kubernetes") is None:
            raise UserError(
                "this pod is of an indexed Kubernetes job, and finding the others needs the "
                "package kubernetes (jax[k8s]), which is not installed; install it, or set "
                "distributed.coordinator, distributed.num_processes and distributed.process_id, "
                "or distributed.initialize=never to run alone"
            )
        return "Kubernetes", dict(cluster_detection_method="k8s")
    return "", None


def _count(environment: Mapping[str, str], name: str) -> int:
    """A number of processes; 1 without the variable."""
    text = environment.get(name, "1")
    if not text.isdecimal():
        raise UserError(
            f"{name}={text} in the environment must be a number of processes; set "
            "distributed.initialize=never to run alone"
        )
    return int(text)


def _slurm(environment: Mapping[str, str]) -> dict[str, object]:
    try:
        first_host = _first_host(environment["SLURM_STEP_NODELIST"])
        # One of 4096 high ports, another for each step of each job.
        job, step = int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_STEP_ID", "0"))
        arguments = dict(
            coordinator_address=f"{first_host}:{61440 + (job + step) % 4096}",
            num_processes=int(environment["SLURM_NTASKS"]),
            process_id=int(environment["SLURM_PROCID"]),
            cluster_detection_method="deactivate",
        )
        # "1(x4)": one task on each of 4 nodes; "2,1": two and one; "16(x2)": sixteen on both.
        if not _ONE_TASK_A_NODE.fullmatch(environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
            arguments["local_device_ids"] = [int(environment["SLURM_LOCALID"])]
    except (KeyError, ValueError) as error:
        raise UserError(
            f"SLURM's variables are not as srun sets them ({error}); start with srun, or set "
            "distributed.initialize=never to run alone"
        ) from error
    return arguments


def _first_host(nodes: str) -> str:
    """The first name of a SLURM node list, such as `node[001-004,7],login`."""
    name, bracket, rest = nodes.partition("[")
    if "," in name or not bracket:
        return name.partition(",")[0]
    number = rest.replace("-", ",").replace("]", ",").partition(",")[0]
    suffix = rest.partition("]")[2].partition(",")[0]
    return f"{name}{number}{suffix}"
