"""Triton backward kernels for queries: delta, and dq over the lists of the forward kernel."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from pallas_kernels.triton.kernels.walk import masked, offsets, over_keys, place_of, rows_of


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


@triton.jit
def attention_dq(
    q, k, v, dout, shift, delta, items, lists, diagonal, run_first, run_last,
    k_columns, v_columns, keep, tokens, query_blocks,
    dq,
    scale, log2_scale, query_length, key_length, capacity, num_columns,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, LISTED: tl.constexpr,
    WINDOW: tl.constexpr, RUNS: tl.constexpr, HAS_TILES: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dq = scale * dS K of ROWS rows, with dS = P * (dP - delta); see the forward kernel.

    `shift`, fp32 [B, HEADS, query_length], is the rows' final lse in base 2; inf for empty rows.
    """
    place = place_of(items, query_length, HEADS, KV_HEADS, ROWS)
    _, batch, head, _, head_at, _, _, _, row = place
    query_offsets = offsets(ROWS, HEADS, DIM)
    q_tile = tl.load(rows_of(q, batch, row, query_length, head, HEADS, DIM) + query_offsets)
    dout_tile = tl.load(rows_of(dout, batch, row, query_length, head, HEADS, DIM) + query_offsets)
    row_stats = head_at * query_length + row + tl.arange(0, ROWS)
    queries = q_tile, dout_tile, tl.load(shift + row_stats), tl.load(delta + row_stats)
    (acc,) = over_keys(
        _step, (tl.zeros([ROWS, DIM], tl.float32),), queries, place,
        k, v, items, lists, diagonal, run_first, run_last,
        k_columns, v_columns, keep, tokens, query_blocks,
        log2_scale, key_length, capacity, num_columns,
        HEADS, KV_HEADS, DIM, LISTED, WINDOW, RUNS, HAS_TILES, HAS_COLUMNS, KEYS,
    )  # fmt: skip
    target = rows_of(dq, batch, row, query_length, head, HEADS, DIM)
    tl.store(target + query_offsets, (acc * scale).to(dq.dtype.element_ty))


@triton.jit
def _step(
    state, queries, k_tile, v_tile, positions, limits, log2_scale,
    MASKED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    (acc,) = state
    q_tile, dout_tile, row_shift, row_delta = queries
    logits = tl.dot(q_tile, tl.trans(k_tile))
    if MASKED:
        logits = masked(logits, positions[:, None], limits[None, :], WINDOW)
    weights = tl.exp2(logits * log2_scale - row_shift[:, None])
    dp = tl.dot(dout_tile, tl.trans(v_tile))
    ds = weights * (dp - row_delta[:, None])
    return (tl.dot(ds.to(k_tile.dtype), k_tile, acc),)
