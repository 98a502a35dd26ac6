"""The markdown that the attention benchmark writes."""

from collections.abc import Sequence

import jax

from benchmarks.kernels.errors import Errors
from benchmarks.kernels.rows import OWN, Row
from benchmarks.report import number, setting, table_head, table_line

_COLUMNS = (
    "S", "heads, D", "mask", "kernels", "density (blocks + columns)", "select + build ms", "fwd ms",
    "bwd ms", "total ms", "fwd / bwd TFLOP/s executed", "as if dense", "temporary GB",
)  # fmt: skip
_ABOUT = """\
Masks, per query head. A: block diagonals 0..7 and 8 random distant ones, 1000 random columns. \
B: 6 % of the block diagonals (0..7 and random distant ones), 3000 random columns. D: every block \
diagonal. F: a list of 128 x 128 blocks, random block diagonals and block columns.

select: top-p 0.9 of the last queries' attention, at most 4096 columns and 4096 diagonals; build: \
gathered columns and all lists that both passes read; total: selection, build, forward and \
backward as one program (forward + backward for the baselines). TFLOP/s executed: \
4 D (128 x 128 blocks + 128 columns) forward, 2.5 times that backward; as if dense: half of S x S \
instead. cuDNN counts half of S x S. Temporary: memory of the whole program beyond its inputs and \
results, as the compiler reserves it.
"""


def header(seed: int, repeats: int, notes: Sequence[str]) -> str:
    """When, where and with which versions the run was made, and what the columns mean."""
    return (
        f"# Attention on {jax.devices()[0].device_kind}\n\n"
        f"{setting(notes)}. bf16, batch 1, random inputs, seed {seed}, medians "
        f"of {repeats}.\n\n{_ABOUT}\n"
    )


def table(rows: Sequence[Row]) -> str:
    """One line per row."""
    order = sorted(rows, key=lambda r: (-r.shape.dim, r.shape.seq_len, r.mask, r.who != OWN))
    return "\n".join([*table_head(_COLUMNS), *(table_line(_cells(row)) for row in order)]) + "\n"


def line(row: Row) -> str:
    """A row as a line of progress."""
    return ", ".join(
        f"{name} {text}" for name, text in zip(_COLUMNS, _cells(row), strict=True) if text != "–"
    )


def error_table(errors: dict[int, Errors], seq_len: int) -> str:
    """Errors by head dim, mask and kernels, and the largest ratio to cuDNN's on the dense mask."""
    columns = "D", "mask", "kernels", "out", "dq", "dk", "dv", "largest ratio to cuDNN"
    lines = [
        f"Relative error against fp32 at S = {seq_len}: norm of the difference over the norm of "
        "the reference. The ratio is to the errors of cuDNN on the dense mask.",
        "",
        *table_head(columns),
    ]
    for dim, found in errors.items():
        peer = found.get(("D", "cuDNN"))
        for (mask, who), values in found.items():
            ratio = "–"
            if peer and who == OWN:
                ratio = f"{max(values[name] / peer[name] for name in values):.3f}"
            lines.append(
                table_line([str(dim), mask, who, *(f"{x:.3e}" for x in values.values()), ratio])
            )
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    shape, (blocks, columns) = row.shape, row.density()
    density = f"{blocks:.4f}" + (f" + {columns:.4f}" if columns else "")
    build = " + ".join(f"{x:.2f}" for x in (row.select, row.build) if x is not None)
    rates = [row.rates(which) for which in ("forward", "backward")]
    return [
        str(shape.seq_len),
        f"{shape.heads}/{shape.kv_heads}, {shape.dim}",
        row.mask,
        row.who,
        density,
        build or "–",
        number(row.forward),
        number(row.backward),
        number(row.total),
        *(" / ".join(f"{r[i]:.0f}" if r else "–" for r in rates) for i in range(2)),
        "–" if row.temp is None else f"{row.temp / 1e9:.2f}",
    ]
