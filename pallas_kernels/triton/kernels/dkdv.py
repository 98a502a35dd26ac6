"""Triton backward kernels for dk and dv of blocks and of gathered columns, summed in registers."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from pallas_kernels.triton.kernels.walk import (
    BLOCK,
    WORD,
    field,
    masked,
    offsets,
    rows_of,
    seen_from,
)

_PARTS_KIND = tl.constexpr(2)  # `pallas_kernels.work.items.KEY_PARTS`


@triton.jit
def attention_dkdv(
    q, k, v, dout, shift, delta, items, lists, diagonal, first_entries, last_entries,
    dk, dv, dk_parts, dv_parts,
    scale, log2_scale, query_length, key_length, capacity, parts_length,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, LISTED: tl.constexpr,
    WINDOW: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dv = P^T dO and dk = scale * dS^T Q of KEYS keys of a block, for all heads of its group.

    Items of parts of blocks write to dk_parts and dv_parts; PARTS is 0 if there are none.
    """
    program = tl.program_id(0)
    n, piece = program // (BLOCK // KEYS), program % (BLOCK // KEYS)
    batch, kv_head, block = field(items, n, 1), field(items, n, 2), field(items, n, 3)
    numbers = piece * KEYS + tl.arange(0, KEYS)  # within the block
    row = block.to(tl.int64) * BLOCK + piece * KEYS
    key_offsets = offsets(KEYS, KV_HEADS, DIM)
    k_tile = tl.load(rows_of(k, batch, row, key_length, kv_head, KV_HEADS, DIM) + key_offsets)
    v_tile = tl.load(rows_of(v, batch, row, key_length, kv_head, KV_HEADS, DIM) + key_offsets)
    keys = k_tile, v_tile
    state = tl.zeros([KEYS, DIM], tl.float32), tl.zeros([KEYS, DIM], tl.float32)

    GROUP: tl.constexpr = HEADS // KV_HEADS
    FAR: tl.constexpr = WINDOW // BLOCK if WINDOW > BLOCK else 1  # work.lists.far_entry(WINDOW)
    SPLIT: tl.constexpr = BLOCK // ROWS
    query_offsets = offsets(ROWS, HEADS, DIM)
    blocks = key_length // BLOCK
    for member in range(GROUP):
        head = kv_head * GROUP + member
        head_at = batch.to(tl.int64) * HEADS + head
        block_at = head_at * blocks + block
        first, last = tl.load(first_entries + block_at), tl.load(last_entries + block_at)
        if PARTS > 0:
            if field(items, n, 0) == _PARTS_KIND:
                count, number = last - first, field(items, n, 4)
                last = first + count * (number + 1) // PARTS
                first = first + count * number // PARTS
        entries = lists + head_at * capacity
        if LISTED:
            entries = lists + block_at * capacity
        queries = _head_of(q, dout, shift, delta, batch, query_length, head, HEADS, DIM)
        # Only the first entry can be the diagonal. Those that a window cuts share its loop, since
        # two loops with masks spill registers.
        one = tl.minimum(first + 1, last)
        stop = last
        if WINDOW > 0:
            stop = tl.minimum(tl.maximum(one, FAR), last)
        for s in range(first * SPLIT, (one + last - stop) * SPLIT):
            entry = s // SPLIT
            inside = (s - entry * SPLIT) * ROWS
            if WINDOW > 0:
                entry += tl.where(entry < one, 0, stop - one)
            query = _query_block(entries, entry, block, LISTED)
            passing = tl.where(query - block == tl.load(diagonal), 0, BLOCK)
            if WINDOW > 0:
                passing = (query - block - tl.load(diagonal)) * BLOCK
            at = query.to(tl.int64) * BLOCK + inside
            rows = _rows_at(queries, at, HEADS, DIM)
            positions = inside + passing + tl.arange(0, ROWS)
            state = _step(
                state, keys, rows, query_offsets, numbers, positions, log2_scale, True, WINDOW
            )
        query = block  # arbitrary for an empty list
        if one < last:
            query = _query_block(entries, one, block, LISTED)
        for s in range(one * SPLIT, stop * SPLIT):
            at = query.to(tl.int64) * BLOCK + (s - s // SPLIT * SPLIT) * ROWS
            # Prefetched; otherwise the copies of queries, which depend on it, would start too late.
            following = tl.minimum((s + 1) // SPLIT, last - 1)
            query = _query_block(entries, following, block, LISTED)
            rows = _rows_at(queries, at, HEADS, DIM)
            state = _step(state, keys, rows, query_offsets, numbers, numbers, log2_scale, False, 0)

    if PARTS == 0:
        _store(dk, dv, state, scale, batch, row, key_length, kv_head, KV_HEADS)
    elif field(items, n, 0) == _PARTS_KIND:
        row = field(items, n, 5).to(tl.int64) * BLOCK + piece * KEYS
        _store(dk_parts, dv_parts, state, scale, batch, row, parts_length, kv_head, KV_HEADS)
    else:
        _store(dk, dv, state, scale, batch, row, key_length, kv_head, KV_HEADS)


@triton.jit
def attention_dkdv_columns(
    q, k_columns, v_columns, dout, shift, delta, items, keep, tokens, query_blocks,
    dk, dv,
    scale, log2_scale, query_length, num_columns,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dk and dv, fp32 [B, num_columns, HEADS, DIM], of KEYS gathered columns of a query head."""
    program = tl.program_id(0)
    n, piece = program // (BLOCK // KEYS), program % (BLOCK // KEYS)
    batch, head = field(items, n, 1), field(items, n, 2)
    column = field(items, n, 3) * BLOCK + piece * KEYS
    head_at = batch.to(tl.int64) * HEADS + head
    key_offsets = offsets(KEYS, HEADS, DIM)
    k_tile = tl.load(rows_of(k_columns, batch, column, num_columns, head, HEADS, DIM) + key_offsets)
    v_tile = tl.load(rows_of(v_columns, batch, column, num_columns, head, HEADS, DIM) + key_offsets)
    keys = k_tile, v_tile
    state = tl.zeros([KEYS, DIM], tl.float32), tl.zeros([KEYS, DIM], tl.float32)

    SPLIT: tl.constexpr = BLOCK // ROWS
    query_offsets = offsets(ROWS, HEADS, DIM)
    blocks = query_length // BLOCK
    queries = _head_of(q, dout, shift, delta, batch, query_length, head, HEADS, DIM)
    head_tokens, words = tokens + head_at * num_columns, num_columns // WORD
    # From the last queries backwards: all column tiles of a head start there together and read the
    # same queries, which the L2 cache then serves.
    for s in range(0, (blocks - field(items, n, 4)) * SPLIT):
        entry = s // SPLIT
        query, inside = blocks - 1 - entry, (s - entry * SPLIT) * ROWS
        at = query.to(tl.int64) * BLOCK + inside
        limits = seen_from(head_tokens, keep + (head_at * blocks + query) * words, column, KEYS)
        positions = tl.load(query_blocks + query) * BLOCK + inside + tl.arange(0, ROWS)
        rows = _rows_at(queries, at, HEADS, DIM)
        state = _step(state, keys, rows, query_offsets, limits, positions, log2_scale, True, 0)

    _store(dk, dv, state, scale, batch, column, num_columns, head, HEADS)


@triton.jit
def _store(dk, dv, state, scale, batch, row, length, head, HEADS: tl.constexpr):
    dk_tile, dv_tile = state
    dk_tile *= scale
    KEYS: tl.constexpr = dk_tile.shape[0]
    DIM: tl.constexpr = dk_tile.shape[1]
    at = offsets(KEYS, HEADS, DIM)
    tl.store(rows_of(dk, batch, row, length, head, HEADS, DIM) + at, dk_tile)
    tl.store(rows_of(dv, batch, row, length, head, HEADS, DIM) + at, dv_tile)


@triton.jit
def _query_block(entries, entry, block, LISTED: tl.constexpr):
    value = tl.load(entries + entry)
    if not LISTED:
        value = block + value
    return value


@triton.jit
def _head_of(q, dout, shift, delta, batch, length, head, HEADS: tl.constexpr, DIM: tl.constexpr):
    q_head = rows_of(q, batch, 0, length, head, HEADS, DIM)
    dout_head = rows_of(dout, batch, 0, length, head, HEADS, DIM)
    at = (batch.to(tl.int64) * HEADS + head) * length
    return q_head, dout_head, shift + at, delta + at


@triton.jit
def _rows_at(queries, at, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Returns where rows from number `at` of a head on are in each array."""
    q, dout, shift, delta = queries
    return q + at * (HEADS * DIM), dout + at * (HEADS * DIM), shift + at, delta + at


@triton.jit
def _step(
    state, keys, rows, query_offsets, limits, positions, log2_scale,
    MASKED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Adds the gradients from some rows; MASKED and WINDOW hide keys as in `masked`."""
    dk, dv = state
    k_tile, v_tile = keys
    q, dout, shift, delta = rows
    q_tile, dout_tile = tl.load(q + query_offsets), tl.load(dout + query_offsets)
    numbers = tl.arange(0, query_offsets.shape[0])
    row_shift, row_delta = tl.load(shift + numbers), tl.load(delta + numbers)
    logits = tl.dot(k_tile, tl.trans(q_tile))
    if MASKED:
        logits = masked(logits, positions[None, :], limits[:, None], WINDOW)
    weights = tl.exp2(logits * log2_scale - row_shift[None, :])
    dv = tl.dot(weights.to(dout_tile.dtype), dout_tile, dv)
    dp = tl.dot(v_tile, tl.trans(dout_tile))
    ds = weights * (dp - row_delta[None, :])
    return tl.dot(ds.to(q_tile.dtype), q_tile, dk), dv
