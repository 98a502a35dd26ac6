"""Checks between the processes of a run before they share devices.

They use the key-value store of JAX's coordination service, because a collective would already need
the same program on all processes.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jaxlib.version
from flax.traverse_util import flatten_dict
from jax._src import distributed as jax_distributed  # its key-value store has no public name

from mtraining_jax.config import Config
from mtraining_jax.utils.errors import UserError

# Fields that may differ between processes.
_OWN = ("distributed.process_id", "distributed.timeout_seconds", "run.compile_cache_dir")
_DONE = "done: "
_WHILE_ALL_LIVE = 7 * 24 * 3600  # seconds
_numbers = itertools.count()


def run_on_process_0(act: Callable[[], Any], timeout: int) -> Any:
    """Calls `act` on process 0 and returns its result, serializable as JSON, on all processes.

    The others wait for `timeout` seconds. All processes must make these calls in the same order,
    and all of them raise a UserError of `act`.
    """
    if jax.process_count() == 1:
        return act()
    key = _next_key()
    if jax.process_index() > 0:
        answer = _wait_for(key, timeout)
        if not answer.startswith(_DONE):
            raise UserError(answer.removeprefix("error: "))
        return json.loads(answer.removeprefix(_DONE))
    try:
        result = act()
    except UserError as error:
        _store().key_value_set(key, f"error: {error}")
        raise
    _store().key_value_set(key, f"{_DONE}{json.dumps(result)}")
    return result


def check_same_configuration(config: Config) -> None:
    """Compares the configuration and versions of every process with those of the first one."""
    values = {"version of jax": jax.__version__, "version of jaxlib": jaxlib.version.__version__}
    values |= flatten_dict(config.to_dict(), sep=".")
    shared = {name: value for name, value in values.items() if name not in _OWN}
    assert_same_on_all_processes(shared, config.distributed.timeout_seconds)


def check_same_data(identity: Mapping[str, Any], section: str) -> None:
    """Compares the identities of the loaders of `section`, as each process opens its own files."""
    values = {f"{section}: {name}": value for name, value in identity.items()}
    # Opening files may take one process much longer; JAX notices if a process dies meanwhile.
    assert_same_on_all_processes(values, _WHILE_ALL_LIVE)


def assert_same_on_all_processes(values: Mapping[str, Any], timeout: int) -> None:
    """Raises a UserError on all processes, with a line for each JSON value that differs."""
    if jax.process_count() == 1:
        return
    own = json.loads(json.dumps(dict(values)))
    receive = _send(own)

    def compare() -> None:
        sentences: dict[str, str] = {}
        for number in range(1, jax.process_count()):
            sentences = differences(own, receive(number, timeout), number) | sentences
        if sentences:
            raise UserError("\n".join(sentences.values()))

    run_on_process_0(compare, timeout)


def collect(value: Any, timeout: int) -> list[Any]:
    """Returns the JSON values of all processes, in process 0; an empty list in the others."""
    receive, values = _send(value), []

    def wait() -> None:
        values.append(value)
        values.extend(receive(number, timeout) for number in range(1, jax.process_count()))

    run_on_process_0(wait, timeout)
    return values


def meet(timeout: int) -> None:
    """Waits for all processes, and returns in all of them at nearly the same time."""
    if jax.process_count() > 1:
        try:
            _store().wait_at_barrier(_next_key(), timeout * 1000)
        except Exception as error:  # jaxlib has its own exception type
            raise UserError(f"the processes did not meet within {timeout} seconds") from error


def wait_for_all_processes() -> None:
    """Waits until all processes call this, however long; `PeerWatch` ends the wait if one is lost.

    Collectives of CPUs fail after 30 seconds, but a process may compile for longer than others.
    """
    assert_same_on_all_processes({}, _WHILE_ALL_LIVE)


def differences(first: Mapping[str, Any], other: Mapping[str, Any], number: int) -> dict[str, str]:
    """Returns messages on values of process `number` that differ from the first one's, by name."""
    return {
        name: f"{name} = {json.dumps(first.get(name))} in process 0 but "
        f"{json.dumps(other.get(name))} in process {number}; it must be the same in all "
        "processes of a run"
        for name in sorted(first.keys() | other.keys())
        if first.get(name) != other.get(name)
    }


def _send(value: Any) -> Callable[[int, int], Any]:
    """Sends a value to process 0; returns a function of process number and timeout that gets it."""
    key = _next_key()
    if jax.process_index() > 0:
        _store().key_value_set(f"{key}/{jax.process_index()}", json.dumps(value))
    return lambda number, timeout: json.loads(_wait_for(f"{key}/{number}", timeout))


def _next_key() -> str:
    return f"mtraining/{next(_numbers)}"


def _store() -> Any:  # exists once `jax.distributed` is initialized
    return jax_distributed.global_state.client


def _wait_for(key: str, timeout: int) -> str:
    try:
        return _store().blocking_key_value_get(key, timeout * 1000)
    except Exception as error:  # jaxlib has its own exception type
        raise UserError(
            f"another process of the run did not answer within {timeout} seconds, or has ended; "
            "see its output for the reason (distributed.timeout_seconds sets the wait at startup)"
        ) from error
