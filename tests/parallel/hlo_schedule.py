"""Extracts from a scheduled program what runs during its transfers."""

import dataclasses
import re

KERNEL = 'custom_call_target="mosaic_gpu'
_OPCODE = re.compile(r" ([a-z][a-z-]*)\(%?([\w.-]*)")
_CALLED = re.compile(r"\b(?:body|to_apply|calls)=%?([\w.-]+)")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective between devices.

    Attributes:
        computation: the computation it starts in.
        backward: whether it belongs to the backward pass.
        hidden: whether an attention kernel, or a loop of them, runs during the transfer.
        last: whether no kernel starts after it in its computation, so nothing can hide it.
    """

    computation: str
    backward: bool
    hidden: bool
    last: bool


def transfers(scheduled: str, kinds: tuple[str, ...] = ("collective-permute",)) -> list[Transfer]:
    """Returns all collectives of some kinds in a scheduled HLO module's text, in order."""
    lines_of = computations(scheduled)

    def works(line: str) -> bool:
        """Whether an instruction runs an attention kernel."""
        if KERNEL in line:
            return True
        return any(
            works(inner) for name in _CALLED.findall(line) for inner in lines_of.get(name, ())
        )

    found = []
    for name, lines in lines_of.items():
        kernels = [i for i, line in enumerate(lines) if works(line)]
        for i, line in enumerate(lines):
            opcode = _OPCODE.search(line)
            if not opcode or opcode[1].removesuffix("-start") not in kinds:
                continue
            end = i
            if opcode[1].endswith("-start"):
                started = line.split(" = ")[0].strip().lstrip("%")
                end = next(
                    j
                    for j, later in enumerate(lines[i:], i)
                    if (done := _OPCODE.search(later))
                    and done[1].endswith("-done")
                    and done[2] == started
                )
            found.append(
                Transfer(
                    name,
                    backward="transpose(" in line,
                    hidden=any(i < k < end for k in kernels),
                    last=not any(k > i for k in kernels),
                )
            )
    return found


def computations(text: str) -> dict[str, list[str]]:
    """Returns the lines of each computation by name."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" ") and "(" in line:
            name = line.removeprefix("ENTRY ").split(" ")[0].lstrip("%")
            lines = found.setdefault(name, [])
        elif line.startswith("  ") and " = " in line:
            lines.append(line.strip().removeprefix("ROOT "))
    return found
