"""Runs every Hopper kernel under every tool of compute-sanitizer, and prints their reports.

    python benchmarks/sanitize/sanitize.py --out /tmp/sanitized  # one Hopper GPU, 16 cores
    python benchmarks/sanitize/sanitize.py --out /tmp/sanitized --sanitizer PATH --tools racecheck

First each problem of `small_problems.py` runs without a tool, in a separate process: it compiles,
compares its results with those of the XLA backend, and stores them. Then it runs once under each
tool, with the compiled programs, on two multiprocessors, so that each thread block processes
several items. Its results must be bit-identical to the stored ones. The correct and incorrect
kernels of `barriers.cu` run under the same tools (this needs nvcc), to judge the value of reports.
Newer versions of compute-sanitizer know more of the order imposed by Hopper's barriers and bulk
copies (2026.1 and 2026.3 removed false reports), so prefer one.

Logs are kept in the folder. The exit status is 1 if a Hopper kernel was reported, or a run gave no
result.
"""

import argparse
import concurrent.futures
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.sanitize import sanitizer  # noqa: E402
from benchmarks.sanitize.sanitizer import Result  # noqa: E402

BARRIERS = ("threads", "bulk", "tensor", "store")
WRONG_BARRIERS = ("threads-unwaited", "bulk-unwaited", "tensor-unwaited", "store-unfenced")
MULTIPROCESSORS = 2
# A tool that treats writes of bulk copies as uninitialized (2026.4): small kernels only.
_BLIND = ("initcheck-shared",)
_ENVIRONMENT = {
    # Every array has a separate allocation, so that its bounds are checked.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    # One kernel at a time, and no autotuning runs.
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer=",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "PYTHONUNBUFFERED": "1",
}
Run = tuple[str, str]  # tool and problem


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for programs and logs")
    parser.add_argument("--sanitizer", default=shutil.which("compute-sanitizer"))
    parser.add_argument("--tools", nargs="+", choices=sanitizer.TOOLS, default=sanitizer.TOOLS)
    parser.add_argument("--problems", nargs="+", help="names, as printed by --list")
    parser.add_argument("--jobs", type=int, default=12, help="number of concurrent processes")
    parser.add_argument("--timeout", type=float, default=150, help="seconds per run")
    parser.add_argument("--deadline", type=float, default=540, help="seconds for all runs")
    parser.add_argument("--list", action="store_true", help="print the names of all problems")
    parser.add_argument("--worker", metavar="PROBLEM", help=argparse.SUPPRESS)
    parser.add_argument("--expect", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.worker is not None:
        return work(args.worker, args.out, args.expect)
    names = _names()
    if args.list:
        print("\n".join(names))
        return 0
    chosen = args.problems or names
    if unknown := sorted(set(chosen) - set(names)):
        print(f"error: --problems: unknown problem {', '.join(unknown)}", file=sys.stderr)
        return 2
    if not args.sanitizer or not sanitizer.version(args.sanitizer):
        print(f"error: --sanitizer={args.sanitizer} is not compute-sanitizer", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"compute-sanitizer {sanitizer.version(args.sanitizer)}", flush=True)
    return _run_all(args, chosen)


def work(name: str, out: Path, expect: bool) -> int:
    """Runs one problem; the exit status is 1 if its results are wrong.

    Args:
        name: name of the problem.
        out: folder of programs and results.
        expect: whether to compare with stored results, bit by bit.
    """
    import jax
    import numpy as np

    from benchmarks.sanitize import small_problems
    from pallas_kernels.mosaic_gpu import device

    device.multiprocessors = lambda interpret: MULTIPROCESSORS
    problem = next(p for p in small_problems.problems() if p.name == name)
    texts = []

    def compiled(step: Callable, values: dict, backend: str) -> Callable:
        begin = time.monotonic()
        program = small_problems.jitted(step, backend).lower(values).compile()
        texts.append(program.as_text())
        print(f"{step.__name__} on {backend}: {time.monotonic() - begin:.1f} s", flush=True)
        return program

    found = small_problems.run(problem, problem.backend, compiled)
    path = out / f"{name}.npz"
    raw = {key: np.frombuffer(x.tobytes(), np.uint8) for key, x in found.items()}
    if expect:
        with np.load(path) as stored:
            different = [key for key in raw if not np.array_equal(raw[key], stored[key])]
        print(f"different bits in {', '.join(different)}" if different else "bit-identical")
        return min(len(different), 1)
    calls = " ".join(line for text in texts for line in text.splitlines() if "mosaic_gpu" in line)
    if missing := [kernel for kernel in problem.kernels if f"/{kernel}/" not in calls]:
        print(f"{', '.join(missing)} did not run")
        return 1
    np.savez(path, **raw)
    right = small_problems.close(found, small_problems.run(problem, "xla", compiled))
    print(f"{jax.devices()[0].device_kind}: {'right' if right else 'WRONG'}")
    return 0 if right else 1


def table(tools: Iterable[str], results: dict[Run, Result]) -> list[str]:
    """Formats the reports of each tool for each problem as Markdown."""
    tools, rows = list(tools), []
    for problem in dict.fromkeys(name for _, name in results):
        cells = [results.get((tool, problem)) for tool in tools]
        verdicts = ["not run" if r is None else f"{r.verdict} ({r.seconds:.0f} s)" for r in cells]
        rows.append(f"| {problem} | {' | '.join(verdicts)} |")
    head = [f"| problem | {' | '.join(tools)} |", "|---" * (len(tools) + 1) + "|"]
    seen = {}  # the first report of each kind, with its sources
    for (tool, problem), result in results.items():
        if result.report:
            seen.setdefault(result.report, []).append(f"{tool} of {problem}")
    said = [f"- {report}: {', '.join(where[:6])}" for report, where in seen.items()]
    return [*head, *rows, "", *said]


def failed(results: dict[Run, Result]) -> list[Run]:
    """Returns the runs of Hopper kernels with unexpected results."""
    barriers = (*BARRIERS, *WRONG_BARRIERS)
    return [
        (tool, name)
        for (tool, name), result in results.items()
        if result.verdict != "clean" and name not in barriers
    ]


def worth(tools: Iterable[str], results: dict[Run, Result]) -> list[str]:
    """Lists each tool's reports on the small kernels that are known to be right or wrong."""
    lines = []
    for tool in tools:
        clean = {name: r.verdict == "clean" for (by, name), r in results.items() if by == tool}
        false = [name for name in BARRIERS if clean.get(name) is False]
        missed = [name for name in WRONG_BARRIERS if clean.get(name)]
        lines.append(
            f"- {tool}: right and reported: {', '.join(false) or 'none'}; "
            f"wrong and not reported: {', '.join(missed) or 'none'}"
        )
    return lines


def _run_all(args: argparse.Namespace, names: Sequence[str]) -> int:
    """Prepares the problems, runs them under the tools, and prints the table."""
    give_up = time.monotonic() + args.deadline
    programs = {name: [*_worker(name, args.out)] for name in names}
    prepared = _in_parallel(
        args.jobs,
        {
            name: functools.partial(_run, programs[name], args.out / f"{name}.txt", give_up)
            for name in names
        },
    )
    wrong = [name for name, (status, _) in prepared.items() if status != 0]
    for name in wrong:
        print(f"{name} alone: {_tail(args.out / f'{name}.txt')}", flush=True)
    seconds = sum(seconds for _, seconds in prepared.values())
    print(f"{len(names) - len(wrong)} of {len(names)} problems right alone ({seconds:.0f} s)")
    runs = {name: [*program, "--expect"] for name, program in programs.items() if name not in wrong}
    runs |= _barriers(args.out)
    tools = [tool for tool in args.tools if sanitizer.supports(args.sanitizer, tool)]
    numbered = enumerate(
        (tool, name) for tool in tools for name in runs if tool not in _BLIND or name not in names
    )
    jobs = {
        run: functools.partial(_watch, args, *run, runs[run[1]], number, give_up)
        for number, run in numbered
    }
    results = {run: r for run, r in _in_parallel(args.jobs, jobs).items() if r is not None}
    print("\n".join([*table(tools, results), "", *worth(tools, results)]), flush=True)
    bad = failed(results)
    missing = len(jobs) - len(results)
    print(f"\n{len(results) - len(bad)} runs as expected, {len(bad)} not, {missing} skipped")
    return 1 if wrong or bad or missing else 0


def _watch(
    args: argparse.Namespace, tool: str, name: str, program: list[str], number: int, give_up: float
) -> Result | None:
    """Runs a program under a tool; returns None if there is no time left for it."""
    if time.monotonic() > give_up:
        return None
    log, output = (args.out / f"{tool}-{name}.{end}" for end in ("log", "txt"))
    command = sanitizer.command(args.sanitizer, tool, program, log, number, sanitizer.KERNELS)
    limit = min(give_up + 20, time.monotonic() + args.timeout)
    status, seconds = _run(command, output, limit)
    texts = (path.read_text(errors="replace") if path.exists() else "" for path in (log, output))
    result = sanitizer.read(*texts, status, seconds)
    print(f"{tool} {name}: {result.verdict} ({seconds:.0f} s) {result.report[:200]}", flush=True)
    return result


def _run(command: list[str], output: Path, until: float) -> tuple[int | None, float]:
    """Returns the exit status (None at the time limit) and seconds; redirects output to a file."""
    begin = time.monotonic()
    environment = (
        os.environ | _ENVIRONMENT | {"JAX_COMPILATION_CACHE_DIR": str(output.parent / "compiled")}
    )
    with output.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status = process.wait(max(1.0, until - begin))
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, 9)  # the tool and the program under it
            process.wait()
    return status, time.monotonic() - begin


def _in_parallel(jobs: int, work: dict) -> dict:
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = {key: pool.submit(call) for key, call in work.items()}
        return {key: future.result() for key, future in futures.items()}


def _worker(name: str, out: Path) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), f"--out={out}", f"--worker={name}"]


def _names() -> list[str]:
    """Returns the names of all problems, from a separate process, so that this one has no JAX."""
    module = "benchmarks.sanitize.small_problems"
    code = f"from {module} import problems; print(*(p.name for p in problems()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    return done.stdout.split()


def _barriers(out: Path) -> dict[str, list[str]]:
    """Returns the programs of the small kernels by name; none without nvcc."""
    compiler = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    source, binary = Path(__file__).with_name("barriers.cu"), out / "barriers"
    command = [compiler, "-arch=sm_90a", "-std=c++17", "-o", str(binary), str(source)]
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"without {source.name}: {error}", flush=True)
        return {}
    return {name: [str(binary), name] for name in (*BARRIERS, *WRONG_BARRIERS)}


def _tail(path: Path) -> str:
    lines = [x for x in path.read_text(errors="replace").splitlines() if x.strip()]
    return " / ".join(lines[-3:])


if __name__ == "__main__":
    sys.exit(main())
