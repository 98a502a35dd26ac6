"""Triton kernel for delta, the sum of output x its gradient, in a fixed order."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from pallas_kernels.triton.kernels.tiles import offsets, rows_of


@triton.jit
def attention_delta(
    out, dout, delta, length, HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Sums out * dout [B, length, HEADS, DIM] over DIM in fp32, for ROWS rows of one head."""
    tile, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    batch = tl.program_id(1)
    row = tile.to(tl.int64) * ROWS
    rows = row + tl.arange(0, ROWS)
    inside = rows < length
    at = offsets(ROWS, HEADS, DIM)
    x = tl.load(rows_of(out, batch, row, length, head, HEADS, DIM) + at, inside[:, None], 0.0)
    y = tl.load(rows_of(dout, batch, row, length, head, HEADS, DIM) + at, inside[:, None], 0.0)
    sums = tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    tl.store(delta + (batch.to(tl.int64) * HEADS + head) * length + rows, sums, inside)
