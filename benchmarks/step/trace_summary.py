"""Where the time of a training step goes on GPUs, from a trace of JAX's profiler.

    python train.py --config qwen3b_512k --profile.start=6 --profile.steps=2
    python -m benchmarks.step.trace_summary runs/qwen3b_512k/profile

Reads the `.trace.json.gz` of the newest trace in a folder and, for each GPU, the events of its
streams. Time in which events of several kinds run at once counts for each kind. The first table
gives, for one step, the mean over the GPUs and the largest value of any GPU:

- time: at least one event of this kind is running;
- exposed (collectives and copies only): the part of this time in which no attention kernel, matrix
  product or other kernel runs;
- idle: nothing runs, between the first and the last event of the trace.

A second table lists the kernels that take longest. Pallas kernels are listed with the XLA operation
that launched them, since several can have the same name. A third table lists exposed collectives
and copies with the compute kernel that runs next, which most likely waits for them. Needs no
JAX.
"""

import argparse
import bisect
import collections
import dataclasses
import gzip
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import table_head, table_line

ATTENTION, GEMM, COLLECTIVE, COPY, OTHER = (
    "attention kernels", "matrix products", "collectives", "copies and memset", "other kernels",
)  # fmt: skip
KINDS = (ATTENTION, GEMM, OTHER, COLLECTIVE, COPY)
_COMPUTE = (ATTENTION, GEMM, OTHER)
# Searched for in a kernel's name in this order; the first match decides.
_NAMES = (
    (COLLECTIVE, r"nccl|memcpyp2p|memcpy p2p|all_?reduce_kernel|nvshmem"),
    (ATTENTION, r"mosaic_gpu|attention_(forward|delta|dq|dkdv)"),
    (GEMM, r"gemm|nvjet|cutlass|cublas|xmma"),
    (COPY, r"^memcpy|^memset|copy"),
)
# XLA operations with uninformative kernel names.
_COLLECTIVE_OPS = ("all-reduce", "all-gather", "reduce-scatter", "collective-", "all-to-all")
_STEP = "train_step"  # name of a step in mtraining_jax.training.loop.profile

Interval = tuple[float, float]  # microseconds


@dataclasses.dataclass(frozen=True)
class Event:
    """A kernel on a stream, its times in microseconds, and the XLA operation if known."""

    name: str
    kind: str
    start: float
    end: float
    operation: str = ""

    @property
    def launched(self) -> str:
        """The name, with the operation in parentheses."""
        return f"{self.name} ({self.operation})" if self.operation else self.name


class Trace(NamedTuple):
    """Number of marked training steps, and events by the name of the GPU."""

    steps: int
    gpus: dict[str, list[Event]]


class Summary(NamedTuple):
    """Times of one GPU over the whole trace, in microseconds.

    Attributes:
        window: from the start of the first event to the end of the last.
        busy: with an event of a kind running, by kind.
        exposed: of this, with no compute kernel running; collectives and copies only.
        idle: with nothing running.
    """

    window: float
    busy: dict[str, float]
    exposed: dict[str, float]
    idle: float


def kind_of(name: str, operation: str = "") -> str:
    """The kind of a kernel, by its name and the XLA operation that launched it."""
    if operation.startswith(_COLLECTIVE_OPS):
        return COLLECTIVE
    return next((kind for kind, x in _NAMES if re.search(x, name.lower())), OTHER)


def find_traces(path: Path) -> list[Path]:
    """The files of the newest trace under a folder, one per process; or the file itself.

    Raises:
        FileNotFoundError: if there is none.
    """
    if path.is_file():
        return [path]
    files = sorted(path.rglob("*.trace.json.gz"))
    if not files:
        raise FileNotFoundError(f"no *.trace.json.gz under {path}")
    newest = max(file.parent.name for file in files)  # named by their time
    return [file for file in files if file.parent.name == newest]


def read_trace(path: Path) -> Trace:
    """Reads one file.

    Raises:
        ValueError: if it is damaged, or not a trace.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a complete trace ({error})") from error
    named = {"process_name": {}, "thread_name": {}}  # by process and thread
    for event in events:
        if event.get("ph") == "M" and event.get("name") in named:
            names = named[event["name"]]
            names[event["pid"], event.get("tid")] = event["args"]["name"]
    processes = {pid: name for (pid, _), name in named["process_name"].items()}
    gpus: dict[str, list[Event]] = collections.defaultdict(list)
    steps = set()
    for event in events:
        if event.get("ph") != "X":
            continue
        name, arguments = event.get("name", ""), event.get("args") or {}
        if name == _STEP and "step_num" in arguments:
            steps.add(arguments["step_num"])
        process = processes.get(event["pid"], "")
        lane = named["thread_name"].get((event["pid"], event.get("tid")), "")
        if "/device:GPU:" in process and lane.startswith("Stream"):
            start, operation = float(event["ts"]), str(arguments.get("hlo_op", ""))
            end = start + float(event.get("dur", 0))
            gpus[process].append(Event(name, kind_of(name, operation), start, end, operation))
    return Trace(len(steps), dict(gpus))


def summarize(events: Sequence[Event]) -> Summary:
    """The times of one GPU."""
    unions = {kind: _union((e.start, e.end) for e in events if e.kind == kind) for kind in KINDS}
    everything = _union(x for union in unions.values() for x in union)
    compute = _union(x for kind in _COMPUTE for x in unions[kind])
    window = everything[-1][1] - everything[0][0]
    return Summary(
        window=window,
        busy={kind: _length(unions[kind]) for kind in KINDS},
        exposed={kind: _length(_minus(unions[kind], compute)) for kind in (COLLECTIVE, COPY)},
        idle=window - _length(everything),
    )


def exposures(events: Sequence[Event]) -> collections.Counter[tuple[str, str, str]]:
    """Microseconds in which a transfer runs and no compute kernel does, on one GPU.

    By name and kind of the transfer and name of the compute kernel that starts next, "" if there is
    none. Time that several transfers leave exposed at once counts for each.
    """
    kernels = sorted((e.start, e.launched) for e in events if e.kind in _COMPUTE)
    compute = _union((e.start, e.end) for e in events if e.kind in _COMPUTE)
    found = collections.Counter()
    for event in (event for event in events if event.kind not in _COMPUTE):
        for start, end in _minus([(event.start, event.end)], compute):
            after = bisect.bisect_left(kernels, (end, ""))
            following = kernels[after][1] if after < len(kernels) else ""
            found[event.launched, event.kind, following] += end - start
    return found


def report(gpus: dict[str, list[Event]], steps: int, top: int) -> list[str]:
    """Lines of the three tables, the second and third with `top` rows."""
    summaries = [summarize(events) for events in gpus.values()]
    every = [event for events in gpus.values() for event in events]
    window = sum(x.window for x in summaries)
    per_step = steps * len(gpus)

    def times(total: float) -> tuple[str, str]:
        """Mean over the GPUs per step in ms, and as a fraction of the trace."""
        return f"{total / per_step / 1e3:.2f}", f"{total / window:.1%}"

    def row(name: str, each: Sequence[float], exposed: str = "", events: str = "") -> str:
        mean, fraction = times(sum(each))
        return table_line((name, mean, f"{max(each) / steps / 1e3:.2f}", fraction, exposed, events))

    lines = [f"{steps} steps on {len(gpus)} GPUs; times of one step in ms", ""]
    lines += table_head(("kind", "mean", "largest", "share", "exposed", "events"))
    for kind in KINDS:
        exposed = "" if kind in _COMPUTE else times(sum(x.exposed[kind] for x in summaries))[0]
        count = f"{sum(e.kind == kind for e in every) / per_step:.0f}"
        lines.append(row(kind, [x.busy[kind] for x in summaries], exposed, count))
    lines.append(row("idle", [x.idle for x in summaries]))
    lines.append(row("step", [x.window for x in summaries]))

    lines += ["", *table_head(("kernel", "kind", "mean ms", "share", "events"))]
    totals, counts = collections.Counter(), collections.Counter()
    for event in every:
        key = event.launched if event.kind == ATTENTION else event.name, event.kind
        totals[key] += event.end - event.start
        counts[key] += 1
    for (name, kind), total in totals.most_common(top):
        count = f"{counts[name, kind] / per_step:.0f}"
        lines.append(table_line((_short(name), kind, *times(total), count)))

    lines += ["", *table_head(("exposed", "kind", "before", "mean ms", "share"))]
    exposed = sum(map(exposures, gpus.values()), collections.Counter())
    for (name, kind, following), total in exposed.most_common(top):
        lines.append(table_line((_short(name), kind, _short(following), *times(total))))
    return lines


def _short(name: str) -> str:
    """Shortens a name for the table; the operation at its end stays."""
    return name if len(name) <= 80 else f"{name[:48]}...{name[-29:]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 2, with a sentence on stderr, if there is nothing to print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="folder of a trace, or a .trace.json.gz")
    parser.add_argument("--steps", type=int, help="steps in the trace; default: the marked ones")
    parser.add_argument("--top", type=int, default=20, help="rows of kernels and of exposed time")
    args = parser.parse_args(argv)
    try:
        files = {x.name.removesuffix(".trace.json.gz"): x for x in find_traces(args.path)}
        traces = {host: read_trace(file) for host, file in files.items()}
        gpus = {
            f"{host} {gpu}": events
            for host, trace in traces.items() for gpu, events in trace.gpus.items()
        }  # fmt: skip
        steps = args.steps or max(trace.steps for trace in traces.values())
        if not gpus or not steps:
            lacks = "no events on streams of a GPU" if not gpus else "no marked step; give --steps"
            raise ValueError(f"{args.path} has {lacks}")
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(report(gpus, steps, args.top)))
    return 0


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint ascending intervals with the same union."""
    merged: list[list[float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end) for start, end in merged]


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _minus(intervals: Iterable[Interval], union: Sequence[Interval]) -> Iterator[Interval]:
    """The parts of the intervals that lie outside a union."""
    for start, end in intervals:
        for i in range(bisect.bisect_right(union, start, key=lambda x: x[1]), len(union)):
            begin, until = union[i]
            if begin >= end:
                break
            if begin > start:
                yield start, begin
            start = until
        if start < end:
            yield start, end


if __name__ == "__main__":
    sys.exit(main())
