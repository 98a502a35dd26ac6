"""Triton forward kernel: one program computes some rows of one item of the query work list."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from pallas_kernels.triton.kernels.walk import masked, offsets, over_keys, place_of, rows_of

_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attention_forward(
    q, k, v, items, lists, diagonal, run_first, run_last,
    k_columns, v_columns, keep, tokens, query_blocks, init_out, init_lse,
    out, lse,
    log2_scale, query_length, key_length, capacity, num_columns,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, LISTED: tl.constexpr,
    WINDOW: tl.constexpr, RUNS: tl.constexpr, HAS_TILES: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    HAS_INIT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Output and lse of ROWS rows, over the tiles and columns of their item of `QueryWork`."""
    place = place_of(items, query_length, HEADS, KV_HEADS, ROWS)
    _, batch, head, _, head_at, _, _, _, row = place
    query_offsets = offsets(ROWS, HEADS, DIM)
    q_tile = tl.load(rows_of(q, batch, row, query_length, head, HEADS, DIM) + query_offsets)
    row_stats = head_at * query_length + row + tl.arange(0, ROWS)
    if HAS_INIT:
        peak = tl.load(init_lse + row_stats) * _LOG2E
        total = tl.where(peak > float("-inf"), 1.0, 0.0)
        acc = tl.load(rows_of(init_out, batch, row, query_length, head, HEADS, DIM) + query_offsets)
    else:
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM], tl.float32)
    acc, peak, total = over_keys(
        _step, (acc, peak, total), (q_tile,), place,
        k, v, items, lists, diagonal, run_first, run_last,
        k_columns, v_columns, keep, tokens, query_blocks,
        log2_scale, key_length, capacity, num_columns,
        HEADS, KV_HEADS, DIM, LISTED, WINDOW, RUNS, HAS_TILES, HAS_COLUMNS, KEYS,
    )  # fmt: skip
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    acc = acc * tl.where(seen, 1.0 / total, 0.0)[:, None]
    tl.store(lse + row_stats, tl.where(seen, (peak + tl.log2(total)) * _LN2, float("-inf")))
    target = rows_of(out, batch, row, query_length, head, HEADS, DIM)
    tl.store(target + query_offsets, acc.to(out.dtype.element_ty))


@triton.jit
def _step(
    state, queries, k_tile, v_tile, positions, limits, log2_scale,
    MASKED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Adds keys to a running base-2 softmax."""
    acc, peak, total = state
    (q_tile,) = queries
    logits = tl.dot(q_tile, tl.trans(k_tile))
    if MASKED:
        logits = masked(logits, positions[:, None], limits[None, :], WINDOW)
    new_peak = tl.maximum(peak, tl.max(logits, 1) * log2_scale)
    base = new_peak
    if MASKED:  # a row may have seen nothing yet
        base = tl.where(new_peak > float("-inf"), new_peak, 0.0)
    decay = tl.exp2(peak - base)
    weights = tl.exp2(logits * log2_scale - base[:, None])
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * decay[:, None])
    return acc, new_peak, total * decay + tl.sum(weights, 1)
