"""The markdown that the ring benchmark writes: a table per layout, ring and number of GPUs."""

from collections.abc import Iterable, Sequence

import jax

from benchmarks.kernels.masks import BLOCK
from benchmarks.report import number, setting, table_head, table_line
from benchmarks.ring.cases import Row

_COLUMNS = (
    "S", "mask", "fwd ms", "bwd ms", "fwd + bwd ms", "TFLOP/s per GPU fwd / bwd / both",
    "of one GPU's rate, same work", "exposed ms (fraction)",
    "index ms: select + build (fraction)", "with index ms (of one GPU's rate)",
    "scaling from 1 GPU", "temp (peak) GB per GPU", "imbalance: layer / path / worst step",
    "medians of",
)  # fmt: skip
_ABOUT = f"""\
Masks as in the attention benchmark. A: block diagonals 0..7 and 8 random distant ones, 1000 \
random columns per head. B: 6 % of the block diagonals, 3000 random columns. D: dense causal. A \
and B are given to the ring as an index. Rings: flat over all GPUs; hierarchical and gather over \
nodes x GPUs per node. Columns are gathered once.

- TFLOP/s executed: 4 D ({BLOCK} x {BLOCK} blocks + {BLOCK} columns) forward, 2.5 times that \
backward, divided by the number of GPUs. Backward: fwd + bwd, which is one program, minus forward.
- Of one GPU's rate: fwd + bwd of the busiest rank on one GPU, with the same kernel calls and no \
communication, over fwd + bwd on all GPUs.
- Exposed: fwd + bwd minus the time of the same program on all GPUs with local data in place of \
every collective (a permute returns what was sent, a sum its own term, a gather copies of its own \
part).
- Index: selection by top-p 0.9 with at most 4096 columns and diagonals over all ranks, and \
building columns and work lists of both passes on one GPU without communication (also part of \
fwd + bwd); fraction of fwd + bwd. With index: selection, then fwd + bwd.
- Scaling: TFLOP/s per GPU (fwd + bwd) over that of one GPU on a sequence shorter by the root of \
the number of GPUs, which has as much work per GPU.
- Memory: temporaries of fwd + bwd by the compiler; in parentheses the peak of everything in use, \
with inputs, results and earlier rows of the same process.
- Imbalance: executed tiles of the busiest rank over the mean, in the layer; the sum over steps of \
the slowest rank's, over the mean; the most uneven step.
"""


def header(seed: int, heads: int, kv_heads: int, dim: int) -> str:
    """When, where and with which versions the run was made, and what the columns mean."""
    return (
        f"# Ring attention on {jax.devices()[0].device_kind}\n\n{setting()}. bf16, batch 1, "
        f"{heads}/{kv_heads} heads, D = {dim}, random inputs, seed {seed}.\n\n{_ABOUT}\n"
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
    return f"{row.problem.name}: " + ", ".join(f"{k} {v}" for k, v in cells if v not in ("", "–"))


def one_gpu_length(seq_len: int, gpus: int, unit: int = 16 * BLOCK) -> int:
    """Length of the sequence with the causal work of one GPU's part of S = `seq_len`."""
    return max(round(seq_len / gpus**0.5 / unit), 1) * unit


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
    rates = (row.rate(row.forward, 1.0), row.rate(row.backward, 2.5), row.rate(row.both))
    exposed = row.both - row.silent if row.silent else None
    parts = [x for x in (row.choose, row.build) if x is not None]
    index = " + ".join(number(x) for x in parts)
    if index:
        index += f" ({sum(parts) / row.both:.1%})"
    step = number(row.step)
    if row.step and row.local:
        step += f" ({row.local / row.step:.3f})"
    memory = f"{row.temp / 1e9:.2f}" if row.temp is not None else "–"
    if row.peak:
        memory += f" ({row.peak / 1e9:.2f})"
    return [
        str(row.problem.seq_len),
        row.mask,
        number(row.forward),
        number(row.backward),
        number(row.both),
        " / ".join(number(x, 1) for x in rates),
        number(row.local and row.local / row.both, 3),
        f"{exposed:.2f} ({exposed / row.both:.1%})" if exposed is not None else "–",
        index or "–",
        step,
        number(_scaling(row, rows), 3),
        memory,
        " / ".join(number(x, 3) for x in (row.layer_balance, row.step_balance, row.worst_step)),
        str(row.repeats),
    ]
