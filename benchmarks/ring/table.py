"""The markdown that the ring benchmark writes: a table per layout, ring and number of GPUs."""

import argparse
from collections.abc import Iterable, Sequence

import jax

from benchmarks.kernels.masks import BLOCK
from benchmarks.options import UNIT
from benchmarks.report import number, setting, table_head, table_line
from benchmarks.ring.cases import Row

_COLUMNS = (
    "S", "mask", "fwd ms", "bwd ms", "fwd + bwd ms", "TFLOP/s per GPU fwd / bwd / both",
    "exposed ms (fraction)", "selection ms (fraction)", "with selection ms", "scaling from 1 GPU",
    "temporary GB per GPU",
)  # fmt: skip
_ABOUT = f"""\
Masks as in the attention benchmark. A: block diagonals 0..7 and 8 random distant ones, 1000 \
random columns per head. B: 6 % of the block diagonals, 3000 random columns. D: dense causal. A \
and B are given to the ring as an index. Rings: flat over all GPUs; hierarchical and gather over \
nodes x GPUs per node. Columns are gathered once.

- TFLOP/s executed: 4 D ({BLOCK} x {BLOCK} blocks + {BLOCK} columns) forward, 2.5 times that \
backward, divided by the number of GPUs. Backward: fwd + bwd, which is one program, minus forward.
- Exposed: fwd + bwd minus the time of the same program on all GPUs with local data in place of \
every collective (a permute returns what was sent, a sum its own term, a gather copies of its own \
part).
- Selection: by top-p 0.9 with at most 4096 columns and diagonals over all ranks; fraction of \
fwd + bwd. With selection: selection, then fwd + bwd.
- Scaling: TFLOP/s per GPU (fwd + bwd) over that of one GPU on a sequence shorter by the root of \
the number of GPUs, which has as much work per GPU.
- Temporary: memory of fwd + bwd by the compiler.
"""


def header(args: argparse.Namespace) -> str:
    """When, where and with which versions the run was made, and what the columns mean."""
    return (
        f"# Ring attention on {jax.devices()[0].device_kind}\n\n{setting()}. bf16, batch 1, "
        f"{args.heads}/{args.kv_heads} heads, D = {args.head_dim}, random inputs, seed "
        f"{args.seed}, medians of {args.repeats}.\n\n{_ABOUT}\n"
    )


def tables(rows: Sequence[Row]) -> str:
    """All tables, those with most GPUs first."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        p = row.problem
        groups.setdefault((-p.gpus, p.layout, p.ring, p.nodes), []).append(row)
    parts = []
    for (gpus, layout, ring, nodes), members in sorted(groups.items()):
        mesh = f"{-gpus} GPUs as {nodes} x {-gpus // nodes}" if gpus < -1 else "1 GPU"
        parts += [f"## {mesh}, {layout}, {ring}", "", *table_head(_COLUMNS)]
        members.sort(key=lambda r: (r.problem.seq_len, r.mask))
        parts += [*(table_line(_cells(row, rows)) for row in members), ""]
    return "\n".join(parts)


def line(row: Row) -> str:
    """A row as a line of progress."""
    cells = zip(_COLUMNS, _cells(row, []), strict=True)
    return f"{row.problem.name}: " + ", ".join(f"{k} {v}" for k, v in cells if v != "–")


def one_gpu_length(seq_len: int, gpus: int) -> int:
    """Length of the sequence with the causal work of one GPU's part of S = `seq_len`."""
    return max(round(seq_len / gpus**0.5 / UNIT), 1) * UNIT


def _scaling(row: Row, rows: Iterable[Row]) -> float | None:
    p = row.problem
    if p.gpus == 1:
        return None
    wanted = 1, row.mask, one_gpu_length(p.seq_len, p.gpus)
    for other in rows:
        if (other.problem.gpus, other.mask, other.problem.seq_len) == wanted:
            return row.rate(row.both) / other.rate(other.both)
    return None


def _cells(row: Row, rows: Iterable[Row]) -> list[str]:
    rates = row.rate(row.forward, 1.0), row.rate(row.backward, 2.5), row.rate(row.both)
    exposed = row.both - row.silent if row.silent is not None else None
    return [
        str(row.problem.seq_len),
        row.mask,
        number(row.forward),
        number(row.backward),
        number(row.both),
        " / ".join(number(x, 1) for x in rates),
        *("–" if ms is None else f"{ms:.2f} ({ms / row.both:.1%})" for ms in (exposed, row.select)),
        number(row.step),
        number(_scaling(row, rows), 3),
        "–" if row.temp is None else f"{row.temp / 1e9:.2f}",
    ]
