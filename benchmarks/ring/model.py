"""Models ring attention of a layer on networks that cannot be measured here, and prints a table.

    python -m benchmarks.ring.model [--rows RING.json] [--nodes 4] [--devices 8]

The input is measured times of kernels, rings of one host and selection (`ring.attention --out`),
and the rate of links between nodes. Overlapping transfers and kernels take as long as the slower of
the two, in the order in which `mtraining_jax.parallel` sends and computes. Without --rows the
output has only the figures of the paper (arXiv 2510.18830), which the model reproduces.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.options import make_parser
from benchmarks.report import table_head, table_line
from benchmarks.ring.cases import Row

INFINIBAND = 25.0  # GB/s in one direction per GPU, as in the paper
FP32_OVER_BF16 = 2


@dataclasses.dataclass(frozen=True)
class Step:
    """Parts of one pass of a ring, in ms.

    Attributes:
        compute: kernels on one shard.
        inner: sending one shard of keys and values inside a node.
        outer: sending it to another node.
    """

    compute: float
    inner: float
    outer: float


Turn = Callable[[int, float, float], float]


def _turn(size: int, visit: float, hop: float) -> float:
    """`size` steps; a hop runs during each of them except the last."""
    return (size - 1) * max(visit, hop) + visit


def _turn_back(size: int, visit: float, hop: float) -> float:
    """`_turn` with fp32 gradients that travel one step later and need a last hop."""
    if size == 1:
        return visit
    gradients = FP32_OVER_BF16 * hop
    between = (size - 2) * max(visit, hop + gradients)
    return max(visit, hop) + between + max(visit, gradients) + gradients


def _flat(turn: Turn, step: Step, nodes: int, devices: int) -> float:
    """A hop hides behind a step, and the slowest link sets the pace."""
    return turn(nodes * devices, step.compute, step.outer if nodes > 1 else step.inner)


def _hierarchical(turn: Turn, step: Step, nodes: int, devices: int) -> float:
    """A hop between nodes hides behind all the steps inside the node."""
    return turn(nodes, turn(devices, step.compute, step.inner), step.outer)


def _gather_forward(step: Step, nodes: int, devices: int) -> float:
    """A node gathers its shards, the first time behind work on a rank's own shard."""
    gather = (devices - 1) * step.inner
    arrival = step.outer + gather
    own, rest = max(step.compute, gather), (devices - 1) * step.compute
    if nodes == 1:
        return own + rest
    whole = devices * step.compute
    return own + max(rest, arrival) + (nodes - 2) * max(whole, arrival) + whole


def _gather_backward(step: Step, nodes: int, devices: int) -> float:
    """A node's gradients are summed and scattered, then sent to the next node one step later."""
    gather = (devices - 1) * step.inner
    arrival = step.outer + gather
    home = FP32_OVER_BF16 * gather + (FP32_OVER_BF16 * step.outer if nodes > 1 else 0)
    own, rest = max(step.compute, gather), (devices - 1) * step.compute
    if nodes == 1:
        return own + rest + home
    whole = devices * step.compute
    between = (nodes - 2) * max(whole, arrival + home)
    return own + max(rest, arrival) + between + max(whole, home) + home


RINGS = {  # forward and backward: (step, nodes, devices) -> ms
    "flat": (functools.partial(_flat, _turn), functools.partial(_flat, _turn_back)),
    "hierarchical": (
        functools.partial(_hierarchical, _turn), functools.partial(_hierarchical, _turn_back),
    ),
    "gather": (_gather_forward, _gather_backward),
}  # fmt: skip


def hop_ms(
    seq_len: int, ranks: int, kv_heads: int, dim: int, gb_per_s: float, latency: float
) -> float:
    """Time to send the keys and values of a rank in bf16; latency in ms."""
    return latency + 2 * 2 * seq_len / ranks * kv_heads * dim / gb_per_s / 1e6


def paper_ms(ring: str) -> float:
    """Forward attention of a layer at 512K tokens on 4 x 8 A100, from the paper's own figures.

    Index 1.13 ms and 2.08 ms of the host, then steps of 0.51 ms; a hop takes 0.13 ms inside a
    node and 0.98 ms between nodes.
    """
    return 1.13 + 2.08 + RINGS[ring][0](Step(compute=0.51, inner=0.13, outer=0.98), 4, 8)


def model(rows: dict[str, Row], args: argparse.Namespace) -> dict[str, list[float]]:
    """Models forward, backward and both with selection, in ms, by ring, from its measured rows.

    Kernels of a rank take the time of the rows without communication, in proportion to its work.
    Selection takes the measured time, although each rank has fewer keys. Everything else that a
    ring took on one host (transfers, partial results, launches) is added unchanged, because what a
    GPU sends and receives does not depend on the number of GPUs.
    """
    ranks = args.nodes * args.devices
    kernels = min(rows.values(), key=_silent)
    found = {}
    for ring, row in rows.items():
        p = row.problem
        outer = hop_ms(p.seq_len, ranks, p.kv_heads, p.dim, args.outer_gb_s, args.latency_ms)
        forward = _silent(kernels) * kernels.forward / kernels.both
        passes = (row.forward, forward), (row.backward, _silent(kernels) - forward)
        times = []
        for time_of, (measured, pure) in zip(RINGS[ring], passes, strict=True):
            visit = (pure * p.gpus / ranks + max(measured - pure, 0.0)) / ranks
            times.append(time_of(Step(visit, 0.0, outer), args.nodes, args.devices))
        found[ring] = [*times, sum(times) + (row.select or 0)]
    return found


def _silent(row: Row) -> float:
    """Time of forward and backward without communication, in ms; 0 if not measured."""
    return row.both if row.problem.gpus == 1 else row.silent or 0.0


def read_rows(path: Path) -> dict[tuple[int, str, int], dict[str, Row]]:
    """Reads the striped row of each ring, by length, mask and number of GPUs.

    The flat ring replaces a hierarchical one that was not measured. One GPU has no ring; its row
    serves for all of them.
    """
    groups: dict[tuple[int, str, int], dict[str, Row]] = {}
    rows = map(Row.from_json, json.loads(path.read_text()))
    for row in sorted(rows, key=lambda row: row.problem.nodes):
        p = row.problem
        if p.layout == "striped" and _silent(row):
            groups.setdefault((p.seq_len, row.mask, p.gpus), {})[p.ring] = row
    found = {}
    for key, by_ring in groups.items():
        if key[2] == 1:
            by_ring = dict.fromkeys(RINGS, by_ring["flat"])
        elif "flat" in by_ring:
            by_ring.setdefault("hierarchical", by_ring["flat"])
        found[key] = {ring: by_ring[ring] for ring in RINGS if ring in by_ring}
    return found


def main(argv: list[str] | None = None) -> str:
    """Returns the markdown."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=Path, metavar="FILE.json", help="of the ring benchmark")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--devices", type=int, default=8, help="per node")
    parser.add_argument("--outer-gb-s", type=float, default=INFINIBAND, help="per GPU, one way")
    parser.add_argument("--latency-ms", type=float, default=0.02, help="of a hop between nodes")
    args = parser.parse_args(argv)
    if args.rows and not args.rows.is_file():
        parser.error(f"--rows: {args.rows} is not a file")
    lines = [
        "Paper (512K tokens, 4 x 8 A100), forward with index, from its own figures per step: "
        + ", ".join(f"{ring} {paper_ms(ring):.2f} ms" for ring in RINGS)
        + "; it reports 34.10 flat and 19.53 hierarchical, and has no gather."
    ]
    if args.rows:
        columns = ("S", "mask", "ring", "measured on", "fwd ms", "bwd ms", "all with selection ms")
        lines += [
            "",
            f"Modeled, not measured: {args.nodes} x {args.devices} GPUs, links as measured inside "
            f"a node, {args.outer_gb_s:g} GB/s between, {args.latency_ms:g} ms a hop; kernels and "
            "selection as measured.",
            "",
            *table_head(columns),
        ]
        for (seq_len, mask, _), rows in read_rows(args.rows).items():
            for ring, times in model(rows, args).items():
                p = rows[ring].problem
                mesh = f"{p.nodes} x {p.gpus // p.nodes} GPUs, {p.ring}"
                cells = (str(seq_len), mask, ring, mesh, *(f"{ms:.2f}" for ms in times))
                lines.append(table_line(cells))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(main())
