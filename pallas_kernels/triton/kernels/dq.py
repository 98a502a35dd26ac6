"""Triton backward kernel for queries: dq, over the same lists as the forward kernel."""

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


@triton.jit
def attention_dq(
    q, k, v, dout, shift, delta, items, lists, diagonal, run_first, run_last,
    k_columns, v_columns, keep, tokens, query_blocks,
    dq,
    scale, log2_scale, query_length, key_length, capacity, num_columns,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, LISTED: tl.constexpr,
    RUNS: tl.constexpr, HAS_TILES: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dq = scale * dS K of ROWS rows, with dS = P * (dP - delta).

    `shift`, fp32 [B, HEADS, query_length], is the rows' final lse in base 2; inf for empty rows.
    `log2_scale` is scale * log2(e). Other arguments are as in the forward kernel.
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
    dout_tile = tl.load(rows_of(dout, batch, row, query_length, head, HEADS, DIM) + query_offsets)
    row_stats = head_at * query_length + row + tl.arange(0, ROWS)
    row_shift, row_delta = tl.load(shift + row_stats), tl.load(delta + row_stats)
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
            passing = tl.where(block - keys == tl.load(diagonal), 0, BLOCK)
            at = (keys.to(tl.int64) * BLOCK + s * KEYS) * (KV_HEADS * DIM)
            k_tile = tl.load(k_head + at + key_offsets)
            v_tile = tl.load(v_head + at + key_offsets)
            limits = s * KEYS + tl.arange(0, KEYS) - passing
            acc = _step(
                acc,
                q_tile,
                dout_tile,
                k_tile,
                v_tile,
                row_shift,
                row_delta,
                rows,
                limits,
                log2_scale,
                True,
            )
        if RUNS == 0:
            start, stop = first, last - one
            if not LISTED:
                start, stop = first + one, last
            acc = _run(
                acc,
                q_tile,
                dout_tile,
                k_head,
                v_head,
                row_shift,
                row_delta,
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
                acc = _run(
                    acc,
                    q_tile,
                    dout_tile,
                    k_head,
                    v_head,
                    row_shift,
                    row_delta,
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
            acc = _step(
                acc,
                q_tile,
                dout_tile,
                k_tile,
                v_tile,
                row_shift,
                row_delta,
                positions,
                limits,
                log2_scale,
                True,
            )

    target = rows_of(dq, batch, row, query_length, head, HEADS, DIM)
    tl.store(target + query_offsets, (acc * scale).to(dq.dtype.element_ty))


@triton.jit
def _run(
    acc, q_tile, dout_tile, k_head, v_head, row_shift, row_delta, entries, start, stop, block,
    rows, log2_scale,
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
        acc = _step(
            acc,
            q_tile,
            dout_tile,
            k_tile,
            v_tile,
            row_shift,
            row_delta,
            rows,
            rows,
            log2_scale,
            False,
        )
    return acc


@triton.jit
def _step(
    acc, q_tile, dout_tile, k_tile, v_tile, row_shift, row_delta, positions, limits, log2_scale,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds dS K of some keys; `positions` and `limits` as in the forward kernel."""
    logits = tl.dot(q_tile, tl.trans(k_tile))
    if MASKED:
        logits = tl.where(positions[:, None] >= limits[None, :], logits, float("-inf"))
    weights = tl.exp2(logits * log2_scale - row_shift[:, None])
    dp = tl.dot(dout_tile, tl.trans(v_tile))
    ds = weights * (dp - row_delta[:, None])
    return tl.dot(ds.to(k_tile.dtype), k_tile, acc)
