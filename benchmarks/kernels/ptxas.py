"""Reports of ptxas on kernels as they are compiled."""

import contextlib
import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Usage:
    """One kernel: registers per thread, bytes spilled, and whether its products are serialized."""

    registers: int
    spilled: int
    serialized: bool


def compiled_with_usage(compile_: Callable[[], Any]) -> tuple[Any, list[Usage]]:
    """Calls `compile_`; also returns what ptxas reported, one item per kernel."""
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"  # read when a kernel is compiled
    with tempfile.TemporaryFile("w+") as log:
        with _output_to(log.fileno()):
            result = compile_()
        log.seek(0)
        text = log.read()
    usages = [
        Usage(int(registers), int(spilled), "C7510" in part)
        for part in text.split("Compile time")
        for spilled, registers in re.findall(
            r"(\d+) bytes spill stores, \d+ bytes spill loads\n.*Used (\d+) registers", part
        )
    ]
    return result, usages


@contextlib.contextmanager
def _output_to(target: int) -> Iterator[None]:
    """Redirects standard output and error, including those of C++ code, to a file descriptor."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [(n, os.dup(n)) for n in (1, 2)]
    try:
        for n, _ in saved:
            os.dup2(target, n)
        yield
    finally:
        for n, copy in saved:
            os.dup2(copy, n)
            os.close(copy)
