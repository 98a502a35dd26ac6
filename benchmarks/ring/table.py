"""The markdown that the ring benchmark writes: a table per layout, ring and number of GPUs."""

from collections.abc import Iterable, Sequence

import jax

from benchmarks.kernels.masks import BLOCK
from benchmarks.report import setting
from benchmarks.ring.cases import Row

_COLUMNS = (
    "S", "mask", "fwd ms", "bwd ms", "fwd + bwd ms", "TFLOP/s a GPU fwd / bwd / both",
    "of one GPU's rate, same work", "exposed ms (share)", "index ms: choose + build (share)",
    "with index ms (of one GPU's rate)", "scaling from 1 GPU", "temp (peak) GB a GPU",
    "imbalance: layer / path / worst step", "medians of",
)


def header(seed: int, heads: int, kv_heads: int, dim: int) -> str:
    """When, where and with what the run was made, and what the columns mean."""
    lines = [
        f"# Ring attention on {jax.devices()[0].device_kind}",
        "",
        f"{setting()}. bf16, batch 1, {heads}/{kv_heads} heads, D = {dim}, random inputs, "
        f"seed {seed}.",
        "",
        "Masks as in the attention benchmark. A: block diagonals 0..7 and 8 random far ones, 1000 "
        "random columns a head. B: 6 % of the block diagonals, 3000 random columns. D: dense "
        "causal. A and B are given to the ring as an index. Rings: flat over all GPUs; "
        "hierarchical and gather over nodes x GPUs of a node. Columns are gathered once.",
        "",
        f"TFLOP/s executed: 4 D ({BLOCK} x {BLOCK} blocks + {BLOCK} columns) forward, 2.5 times "
        "that backward, divided by the number of GPUs. Backward is fwd + bwd, which is one "
        "program, less forward. Of one GPU's rate: fwd + bwd of the busiest rank alone on one "
        "GPU, same kernel calls, nothing sent or received, over fwd + bwd on all GPUs. Exposed: "
        "fwd + bwd less the time of the same program on all GPUs with every collective replaced "
        "by this rank's own data (a permute gives what was sent, a sum its own term, a gather "
        "copies of its own part). Index: choosing one by top-p 0.9 with caps of 4096 over all "
        "ranks, and building columns and work lists of both passes on one GPU without "
        "communication (part of fwd + bwd as well); share of fwd + bwd. With index: choosing, "
        "then fwd + bwd. Scaling: TFLOP/s a GPU (fwd + bwd) over that of one GPU on a sequence "
        "shorter by the root of the number of GPUs, which has as much work. Memory: temporaries "
        "of fwd + bwd by the compiler; in brackets all that was in use at most, inputs, results "
        "and earlier rows of the cell included. Imbalance: executed tiles of the busiest rank "
        "over the mean, of the layer; the sum over steps of the slowest rank's, over the mean; "
        "the most uneven step.",
        "",
        "",
    ]
    return "\n".join(lines)


def tables(rows: Sequence[Row]) -> str:
    """All tables, those with most GPUs first."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        p = row.problem
        groups.setdefault((-p.gpus, p.layout, p.ring, p.nodes), []).append(row)
    parts = []
    for (gpus, layout, ring, nodes), members in sorted(groups.items()):
        mesh = f"{-gpus} GPUs as {nodes} x {-gpus // nodes}" if gpus < -1 else "1 GPU"
        rule = ["---"] * len(_COLUMNS)
        parts += [f"## {mesh}, {layout}, {ring}", "", _line(_COLUMNS), _line(rule)]
        members.sort(key=lambda r: (r.problem.seq_len, r.mask))
        parts += [_line(_cells(row, rows)) for row in members]
        parts.append("")
    return "\n".join(parts)


def line(row: Row) -> str:
    """A row while the run goes on."""
    cells = zip(_COLUMNS, _cells(row, []), strict=True)
    return f"{row.problem.name}: " + ", ".join(f"{k} {v}" for k, v in cells if v not in ("", "–"))


def one_gpu_length(seq_len: int, gpus: int, unit: int = 16 * BLOCK) -> int:
    """Length of the sequence whose causal work equals one GPU's share of S = `seq_len`."""
    return max(round(seq_len / gpus**0.5 / unit), 1) * unit


def _scaling(row: Row, rows: Iterable[Row]) -> float | None:
    p = row.problem
    if p.gpus == 1:
        return None
    for other in rows:
        alone = other.problem
        if (alone.gpus, other.mask) == (1, row.mask) and alone.seq_len == one_gpu_length(
            p.seq_len, p.gpus
        ):
            return row.rate(row.both) / other.rate(other.both)
    return None


def _cells(row: Row, rows: Iterable[Row]) -> list[str]:
    rates = (row.rate(row.forward, 1.0), row.rate(row.backward, 2.5), row.rate(row.both))
    exposed = row.both - row.silent if row.silent else None
    index = " + ".join(_number(x) for x in (row.choose, row.build) if x is not None)
    if index:
        total = sum(x for x in (row.choose, row.build) if x is not None)
        index += f" ({total / row.both:.1%})"
    step = _number(row.step)
    if row.step and row.local:
        step += f" ({row.local / row.step:.3f})"
    memory = f"{row.temp / 1e9:.2f}" if row.temp is not None else "–"
    if row.peak:
        memory += f" ({row.peak / 1e9:.2f})"
    scaling = _scaling(row, rows)
    balance = (row.layer_balance, row.step_balance, row.worst_step)
    return [
        str(row.problem.seq_len), row.mask, _number(row.forward), _number(row.backward),
        _number(row.both), " / ".join(_number(x, 1) for x in rates),
        f"{row.local / row.both:.3f}" if row.local else "–",
        f"{exposed:.2f} ({exposed / row.both:.1%})" if exposed is not None else "–",
        index or "–", step, f"{scaling:.3f}" if scaling else "–", memory,
        " / ".join("–" if x is None else f"{x:.3f}" for x in balance), str(row.repeats),
    ]


def _number(value: float | None, digits: int = 2) -> str:
    if value is None:
        return "–"
    return f"{value:.{digits}f}" if abs(value) < 100 else f"{value:.1f}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
