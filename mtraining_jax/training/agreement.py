"""What the processes of a run tell each other before they share a device.

They speak through the service by which they have found each other, as a collective would already
need the same program on all of them.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jaxlib
from jax._src import distributed as jax_distributed  # its store of texts has no public name

from mtraining_jax.config import Config, config_to_dict
from mtraining_jax.errors import UserError

# Fields that may differ: what each process is, and where it keeps what only it reads.
_OWN = ("distributed.process_id", "distributed.timeout_seconds", "run.compile_cache_dir")
_PREFIX = "mtraining"
_WHILE_ALL_LIVE = 7 * 24 * 3600  # seconds
_numbers = itertools.count()


def first_does(act: Callable[[], Any], timeout: int) -> Any:
    """Runs something on the first process, while the others wait; alone it is a call.

    All processes call it in the same order.

    Args:
        act: what to do.
        timeout: seconds that the others wait.

    Returns:
        What `act` returns on the first process, None on the others.

    Raises:
        UserError: on all processes, the one that `act` raised on the first.
    """
    if jax.process_count() == 1:
        return act()
    key, client = f"{_PREFIX}/{next(_numbers)}", jax_distributed.global_state.client
    if jax.process_index() == 0:
        try:
            result = act()
        except UserError as error:
            client.key_value_set(key, f"error: {error}")
            raise
        client.key_value_set(key, "done")
        return result
    answer = _wait_for(key, timeout)
    if answer != "done":
        raise UserError(answer.removeprefix("error: "))
    return None


def check_same_configuration(config: Config) -> None:
    """Compares the configurations and versions of all processes with those of the first.

    Raises:
        UserError: on all processes, naming each field that differs, with the first process that
            has another value.
    """
    check_same(_told(config), config.distributed.timeout_seconds)


def check_same_data(identity: Mapping[str, Any], section: str) -> None:
    """Compares what all processes read, as each opens the data by itself.

    Processes that read other files would train on batches that are of no sequence, and say nothing.

    Args:
        identity: of the loader; JSON can hold it.
        section: of the configuration, for the sentence.

    Raises:
        UserError: as `check_same_configuration`.
    """
    # One may open its files long before another; who dies meanwhile is noticed by JAX itself.
    check_same({f"{section}: {name}": x for name, x in identity.items()}, _WHILE_ALL_LIVE)


def check_same(told: Mapping[str, Any], timeout: int) -> None:
    """Compares what all processes tell with what the first one does.

    Args:
        told: values by name; JSON can hold them.
        timeout: seconds that processes wait for each other.

    Raises:
        UserError: on all processes, with a line for each name whose values differ.
    """
    if jax.process_count() == 1:
        return
    key, client = f"{_PREFIX}/{next(_numbers)}", jax_distributed.global_state.client
    own = json.loads(json.dumps(dict(told)))
    if jax.process_index() > 0:
        client.key_value_set(f"{key}/{jax.process_index()}", json.dumps(own))

    def compare() -> None:
        found: dict[str, str] = {}
        for number in range(1, jax.process_count()):
            theirs = json.loads(_wait_for(f"{key}/{number}", timeout))
            for name, sentence in differences(own, theirs, number):
                found.setdefault(name, sentence)
        if found:
            raise UserError("\n".join(found.values()))

    first_does(compare, timeout)


def differences(first: Mapping[str, Any], other: Mapping[str, Any], number: int) -> list[tuple]:
    """Names and sentences of what a process has otherwise than the first one.

    Args:
        first, other: values by dotted name.
        number: of the other process.
    """
    return [
        (
            name,
            f"{name} = {json.dumps(first.get(name))} in process 0 and "
            f"{json.dumps(other.get(name))} in process {number}: all processes of a run need the "
            "same",
        )
        for name in sorted(first.keys() | other.keys())
        if first.get(name) != other.get(name)
    ]


def _told(config: Config) -> dict[str, Any]:
    """What must be the same everywhere, by dotted name."""
    versions = {"version of jax": jax.__version__, "version of jaxlib": jaxlib.__version__}
    told = versions | dict(_flat("", config_to_dict(config)))
    return {name: value for name, value in told.items() if name not in _OWN}


def _flat(prefix: str, table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found = []
    for name, value in table.items():
        if isinstance(value, Mapping):
            found += _flat(f"{prefix}{name}.", value)
        else:
            found.append((f"{prefix}{name}", value))
    return found


def _wait_for(key: str, timeout: int) -> str:
    try:
        return jax_distributed.global_state.client.blocking_key_value_get(key, timeout * 1000)
    except Exception as error:  # jaxlib raises its own kind
        raise UserError(
            f"another process of the run said nothing for {timeout} seconds, or has ended; its own "
            "output says why (distributed.timeout_seconds is how long to wait at the start)"
        ) from error
