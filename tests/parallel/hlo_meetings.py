"""Extracts from a compiled program which devices join each collective, and whether in a loop."""

import dataclasses
import re

import numpy as np

from tests.parallel.hlo_schedule import computations

_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|"
    r"ragged-all-to-all)(?:-start)?\("
)
_CALLED = re.compile(r"\b(?:body|condition|to_apply|calls|called_computations)=\{?%?([\w.-]+)")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
_NAMED = re.compile(r"replica_groups=mesh\[([^]]*)\] \{([^}]*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclasses.dataclass(frozen=True)
class Meeting:
    """A collective.

    Attributes:
        kind: opcode, such as "all-reduce".
        devices: sets of devices that wait for each other.
        in_loop: whether it is in the body of a loop, directly or in a called computation.
    """

    kind: str
    devices: frozenset[frozenset[int]]
    in_loop: bool

    def joins(self, groups: int, num_devices: int) -> bool:
        """Whether it joins devices of different groups, for equal groups of consecutive devices."""
        size = num_devices // groups
        return any(len({device // size for device in met}) > 1 for met in self.devices)


def meetings(compiled: str) -> list[Meeting]:
    """Returns all collectives of a compiled HLO module's text.

    Raises:
        ValueError: if a collective does not name its participants.
    """
    lines_of = computations(compiled)
    looped: set[str] = set()
    waiting = [
        name
        for lines in lines_of.values()
        for line in lines
        if " while(" in line
        for name in _CALLED.findall(line)
    ]
    while waiting:
        name = waiting.pop()
        if name not in looped:
            looped.add(name)
            waiting += [x for line in lines_of[name] for x in _CALLED.findall(line)]
    return [
        Meeting(kind[1], _devices(line), name in looped)
        for name, lines in lines_of.items()
        for line in lines
        if (kind := _COLLECTIVE.search(line))
    ]


def _devices(line: str) -> frozenset[frozenset[int]]:
    if listed := _LISTED.search(line):
        rows = [part.split(",") for part in re.findall(r"\{([\d,]+)\}", listed[1])]
    elif named := _NAMED.search(line):
        sizes = {name: int(size) for name, size in re.findall(r"('\w+')=(\d+)", named[1])}
        met = [list(sizes).index(name) for name in named[2].split(",")]
        devices = np.arange(np.prod(list(sizes.values()))).reshape(list(sizes.values()))
        size = np.prod([devices.shape[axis] for axis in met])
        rows = np.moveaxis(devices, met, range(-len(met), 0)).reshape(-1, size)
    elif iota := _IOTA.search(line):
        shape, sizes, turned = (
            [int(x) for x in part.split(",")] if part else None for part in iota.groups()
        )
        rows = np.arange(np.prod(sizes)).reshape(sizes).transpose(turned).reshape(shape)
    else:
        raise ValueError(f"no devices in {line[:200]!r}")
    return frozenset(frozenset(int(device) for device in row) for row in rows)
