"""Triton forward kernel: one program computes some rows of one item of the query work list."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from pallas_kernels.triton.kernels.tiles import (
    BLOCK,
    WORD,
    field,
    key_block,
    offsets,
    rows_of,
    seen_from,
)

_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attention_forward(
    q, k, v, items, lists, diagonal, run_first, run_last,
    k_columns, v_columns, keep, tokens, query_blocks, init_out, init_lse,
    out, lse,
    log2_scale, query_length, key_length, capacity, num_columns,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, LISTED: tl.constexpr,
    RUNS: tl.constexpr, HAS_TILES: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    HAS_INIT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Output and lse of ROWS rows, over the tiles and columns of their item.

    Args:
        q: [B, query_length, HEADS, DIM], bf16 or fp16.
        k, v: [B, key_length, KV_HEADS, DIM].
        items, lists, diagonal, run_first, run_last: from `QueryWork`; runs are read if RUNS > 0.
        k_columns, v_columns: [B, num_columns, HEADS, DIM].
        keep, tokens, query_blocks: from `Columns`, keep as int32.
        init_out, init_lse: a running result to merge with; read with HAS_INIT.
        out: [B, query_length, HEADS, DIM], written.
        lse: fp32 [B, HEADS, query_length], written; natural logarithm.
        log2_scale: scale of the logits times log2(e).
        capacity: entries per list.
    """
    program = tl.program_id(0)
    n, part = program // (BLOCK // ROWS), program % (BLOCK // ROWS)
    batch, head, block = field(items, n, 0), field(items, n, 1), field(items, n, 2)
    kv_head = head // (HEADS // KV_HEADS)
    head_at = batch.to(tl.int64) * HEADS + head
    blocks = query_length // BLOCK
    rows = part * ROWS + tl.arange(0, ROWS)  # of the block
    row = block.to(tl.int64) * BLOCK + part * ROWS
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

    SPLIT: tl.constexpr = BLOCK // KEYS
    if HAS_TILES:
        key_offsets = offsets(KEYS, KV_HEADS, DIM)
        k_head = rows_of(k, batch, 0, key_length, kv_head, KV_HEADS, DIM)
        v_head = rows_of(v, batch, 0, key_length, kv_head, KV_HEADS, DIM)
        first, count = field(items, n, 3), field(items, n, 4)
        entries = lists + head_at * capacity
        if LISTED:
            entries = lists + (head_at * blocks + block) * capacity
        # The only tile that may be on the diagonal: the last of a list, the first of offsets.
        last = first + count
        masked = first
        if LISTED:
            masked = last - 1
        one = tl.minimum(count, 1)
        for s in range(0, one * SPLIT):
            keys = key_block(entries, masked, block, LISTED)
            shift = tl.where(block - keys == tl.load(diagonal), 0, BLOCK)
            at = (keys.to(tl.int64) * BLOCK + s * KEYS) * (KV_HEADS * DIM)
            k_tile = tl.load(k_head + at + key_offsets)
            v_tile = tl.load(v_head + at + key_offsets)
            limits = s * KEYS + tl.arange(0, KEYS) - shift
            acc, peak, total = _step(
                acc, peak, total, q_tile, k_tile, v_tile, rows, limits, log2_scale, True
            )
        if RUNS == 0:
            start, stop = first, last - one
            if not LISTED:
                start, stop = first + one, last
            acc, peak, total = _run(
                acc,
                peak,
                total,
                q_tile,
                k_head,
                v_head,
                entries,
                start,
                stop,
                block,
                rows,
                log2_scale,
                KV_HEADS,
                DIM,
                LISTED,
                KEYS,
            )
        else:
            for run in range(RUNS):
                at = (head_at * RUNS + run) * blocks + block
                start, stop = tl.load(run_first + at), tl.load(run_last + at)
                # The first entry of the first nonempty run was the masked one.
                start += tl.where(start == first, one, 0)
                acc, peak, total = _run(
                    acc,
                    peak,
                    total,
                    q_tile,
                    k_head,
                    v_head,
                    entries,
                    start,
                    stop,
                    block,
                    rows,
                    log2_scale,
                    KV_HEADS,
                    DIM,
                    LISTED,
                    KEYS,
                )
    if HAS_COLUMNS:
        column_offsets = offsets(KEYS, HEADS, DIM)
        of_head = tokens + head_at * num_columns
        of_block = keep + (head_at * blocks + block) * (num_columns // WORD)
        positions = tl.load(query_blocks + block) * BLOCK + rows
        for s in range(0, field(items, n, 5) * SPLIT):
            at = rows_of(k_columns, batch, s * KEYS, num_columns, head, HEADS, DIM)
            k_tile = tl.load(at + column_offsets)
            at = rows_of(v_columns, batch, s * KEYS, num_columns, head, HEADS, DIM)
            v_tile = tl.load(at + column_offsets)
            limits = seen_from(of_head, of_block, s * KEYS, KEYS)
            acc, peak, total = _step(
                acc, peak, total, q_tile, k_tile, v_tile, positions, limits, log2_scale, True
            )

    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    acc = acc * tl.where(seen, 1.0 / total, 0.0)[:, None]
    tl.store(lse + row_stats, tl.where(seen, (peak + tl.log2(total)) * _LN2, float("-inf")))
    target = rows_of(out, batch, row, query_length, head, HEADS, DIM)
    tl.store(target + query_offsets, acc.to(out.dtype.element_ty))


@triton.jit
def _run(
    acc, peak, total, q_tile, k_head, v_head, entries, start, stop, block, rows, log2_scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, LISTED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Processes entries start .. stop - 1 of a list, with unmasked tiles."""
    SPLIT: tl.constexpr = BLOCK // KEYS
    key_offsets = offsets(KEYS, KV_HEADS, DIM)
    keys = block  # arbitrary for an empty list
    if start < stop:
        keys = key_block(entries, start, block, LISTED)
    for s in range(start * SPLIT, stop * SPLIT):
        at = (keys.to(tl.int64) * BLOCK + (s - s // SPLIT * SPLIT) * KEYS) * (KV_HEADS * DIM)
        # Prefetched; otherwise the copies of keys, which depend on it, would start too late.
        following = tl.minimum((s + 1) // SPLIT, stop - 1)
        keys = key_block(entries, following, block, LISTED)
        k_tile = tl.load(k_head + at + key_offsets)
        v_tile = tl.load(v_head + at + key_offsets)
        acc, peak, total = _step(
            acc, peak, total, q_tile, k_tile, v_tile, rows, rows, log2_scale, False
        )
    return acc, peak, total


@triton.jit
def _step(
    acc, peak, total, q_tile, k_tile, v_tile, positions, limits, log2_scale, MASKED: tl.constexpr
):  # fmt: skip
    """Adds keys to a running base-2 softmax; MASKED hides keys from positions below `limits`."""
    logits = tl.dot(q_tile, tl.trans(k_tile))
    if MASKED:
        logits = tl.where(positions[:, None] >= limits[None, :], logits, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(logits, 1) * log2_scale)
    base = new_peak
    if MASKED:  # a row may have seen nothing yet
        base = tl.where(new_peak > float("-inf"), new_peak, 0.0)
    decay = tl.exp2(peak - base)
    weights = tl.exp2(logits * log2_scale - base[:, None])
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * decay[:, None])
    return acc, new_peak, total * decay + tl.sum(weights, 1)
