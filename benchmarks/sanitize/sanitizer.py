"""compute-sanitizer's command lines and logs."""

import dataclasses
import functools
import re
import subprocess
from pathlib import Path

# Tools, possibly with an address space, the slowest first.
TOOLS = ("racecheck", "memcheck", "synccheck", "initcheck", "initcheck-shared")
# Only our kernels are checked: Pallas adds this suffix to all of them.
KERNELS = "mosaic_gpu_kernel"
FOUND = 9  # exit status of a run with reports
_PORTS = 49152, 64  # first port, and ports reserved per run
# Options of the tools. Options that a version does not know are omitted.
_OPTIONS = {
    "memcheck": (("--check-tensor-ops", "yes"),),
    "racecheck": (
        ("--racecheck-num-workers", "2"),
        # Reports hangs, with the barrier, before our time limit.
        ("--racecheck-deadlock-timeout", "60000"),
    ),
    "synccheck": (),
    # A copy to the host reads what bulk copies wrote, which not every version recognizes.
    "initcheck": (("--check-api-memory-access", "no"),),
    "initcheck-shared": (
        ("--check-api-memory-access", "no"), ("--initcheck-address-space", "shared"),
    ),
}  # fmt: skip
# A line of each launch, which some versions (2026.4) count as an error.
_LAUNCH = re.compile(r"^=+\s+Grid:", re.MULTILINE)
_SUMMARY = re.compile(r"^=+ (?:RACECHECK|ERROR) SUMMARY: (\d+) ", re.MULTILINE)
_LINE = re.compile(r"^=+ ?(.*)$", re.MULTILINE)
# Lines of a log that are not reports.
_QUIET = re.compile(r"COMPUTE-SANITIZER|SUMMARY|Kernel launch|^Launch|^\s*$|^\s")


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of one run under a tool.

    Attributes:
        verdict: `clean`, `4 reports`, `timed out`, `no result`, or another failure.
        report: the first report, on one line; empty without one.
        seconds: duration of the run.
    """

    verdict: str
    report: str
    seconds: float


@functools.cache
def version(binary: str) -> str:
    """The version of compute-sanitizer, or an empty string."""
    found = re.search(r"Version (\S+)", _output(binary, "--version"))
    return found[1] if found else ""


def command(
    binary: str, tool: str, program: list[str], log: Path, number: int, kernels: str | None
) -> list[str]:
    """Builds the command line of one run.

    Args:
        binary: compute-sanitizer.
        tool: one of `TOOLS`.
        program: program to check, with its arguments.
        log: file for the tool's reports.
        number: number of the run; concurrent runs need different ones.
        kernels: part of the names of the kernels to check; None for all kernels.
    """
    first, each = _PORTS
    options = [
        # With child processes the tool crashed (version 2025.3.1).
        ("--target-processes", "application-only"),
        ("--error-exitcode", str(FOUND)),
        ("--launch-timeout", "120"),
        ("--port", str(first + each * (number % 200))),
        ("--show-backtrace", "no"),
        ("--print-limit", "50"),
        ("--log-file", str(log)),
        *_OPTIONS[tool],
    ]
    if kernels is not None:
        options.append(("--kernel-name", f"kns={kernels}"))
    known = _output(binary, "--help")
    flags = [part for name, value in options if name in known for part in (name, value)]
    if "--dump-kernel-launches" in known:  # so that the log shows the checked kernels
        flags.append("--dump-kernel-launches")
    return [binary, "--tool", tool.partition("-")[0], *flags, *program]


def supports(binary: str, tool: str) -> bool:
    """Whether this version has a tool."""
    return tool != "initcheck-shared" or "--initcheck-address-space" in _output(binary, "--help")


def read(log: str, output: str, status: int | None, seconds: float) -> Result:
    """Parses the output of a run.

    Args:
        log: log of the tool.
        output: output of the program.
        status: exit status; None if terminated at the time limit.
        seconds: duration of the run.
    """
    reports = [line for line in _LINE.findall(log) if not _QUIET.search(line)]
    report = ""
    if reports:
        lines = _LINE.findall(log)
        at = lines.index(reports[0])
        report = " ".join(" ".join(lines[at : at + 3]).split())
    summary = _SUMMARY.search(log)
    found = int(summary[1]) if summary else 0
    if found == len(_LAUNCH.findall(log)) and not reports:
        found = 0
    if status is None:
        verdict = "timed out" + (f" after {len(reports)} reports" if reports else "")
    elif summary is None:
        verdict, report = "no result", report or _last(output)
    elif found:
        verdict = f"{found} reports"
    elif status not in (0, FOUND):
        verdict, report = f"exit status {status}", _last(output)
    else:
        verdict = "clean"
    return Result(verdict, report, seconds)


def _last(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


@functools.cache
def _output(binary: str, option: str) -> str:
    """Returns the output of a program for an option; empty if the program does not exist."""
    try:
        done = subprocess.run([binary, option], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout + done.stderr
