"""Common parts of the Triton kernels: 64-bit addresses (of over 2^31 elements) and tile masks.

Also the traversal of those that own queries, forward and dq: key blocks and columns.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

BLOCK = tl.constexpr(128)  # g: rows of a query block and keys of a tile
ITEM_FIELDS = tl.constexpr(8)  # as in `pallas_kernels.work.items`
WORD = tl.constexpr(32)  # columns per word of the keep mask
PAST = tl.constexpr(2147483647)  # a position after every query


@triton.jit
def field(items, n, column: tl.constexpr):
    return tl.load(items + n.to(tl.int64) * ITEM_FIELDS + column)


@triton.jit
def rows_of(array, batch, row, length, head, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Returns the address of row `row` of a head in an array [B, length, HEADS, DIM]."""
    return array + ((batch.to(tl.int64) * length + row) * HEADS + head) * DIM


@triton.jit
def offsets(ROWS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Returns the offsets [ROWS, DIM] of the elements of consecutive rows of a head."""
    return tl.arange(0, ROWS)[:, None] * (HEADS * DIM) + tl.arange(0, DIM)[None, :]


@triton.jit
def key_block(entries, entry, block, LISTED: tl.constexpr):
    """Returns the key block of an entry of a query block's list."""
    value = tl.load(entries + entry)
    if not LISTED:
        value = block - value
    return value


@triton.jit
def masked(logits, positions, limits, WINDOW: tl.constexpr):
    """Hides keys from positions below `limits` and, if WINDOW > 0, as far as that or farther."""
    logits = tl.where(positions >= limits, logits, float("-inf"))
    if WINDOW > 0:
        logits = tl.where(positions - WINDOW < limits, logits, float("-inf"))
    return logits


@triton.jit
def seen_from(tokens, keep, first, KEYS: tl.constexpr):
    """Returns the first position that sees each of KEYS columns; `PAST` if the keep bit is off."""
    numbers = first + tl.arange(0, KEYS)
    words = tl.load(keep + numbers // WORD)
    positions = tl.load(tokens + numbers)
    return tl.where((words >> (numbers % WORD)) & 1 == 1, positions, PAST)


@triton.jit
def place_of(
    items, query_length, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Returns item, batch entry, heads, block, number of blocks, rows in it, and the first row."""
    program = tl.program_id(0)
    n, part = program // (BLOCK // ROWS), program % (BLOCK // ROWS)
    batch, head, block = field(items, n, 0), field(items, n, 1), field(items, n, 2)
    kv_head = head // (HEADS // KV_HEADS)
    head_at = batch.to(tl.int64) * HEADS + head
    blocks = query_length // BLOCK
    rows = part * ROWS + tl.arange(0, ROWS)
    row = block.to(tl.int64) * BLOCK + part * ROWS
    return n, batch, head, kv_head, head_at, block, blocks, rows, row


@triton.jit
def over_keys(
    STEP: tl.constexpr, state, queries, place,
    k, v, items, lists, diagonal, run_first, run_last,
    k_columns, v_columns, keep, tokens, query_blocks,
    log2_scale, key_length, capacity, num_columns,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, LISTED: tl.constexpr,
    WINDOW: tl.constexpr, RUNS: tl.constexpr, HAS_TILES: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Folds STEP over the tiles and columns of an item at `place_of`, KEYS keys at a time.

    MASKED and WINDOW hide keys from some positions, as in `masked`.
    """
    n, batch, head, kv_head, head_at, block, blocks, rows, _ = place
    SPLIT: tl.constexpr = BLOCK // KEYS
    FAR: tl.constexpr = WINDOW // BLOCK if WINDOW > BLOCK else 1  # work.lists.far_entry(WINDOW)
    if HAS_TILES:
        key_offsets = offsets(KEYS, KV_HEADS, DIM)
        k_head = rows_of(k, batch, 0, key_length, kv_head, KV_HEADS, DIM)
        v_head = rows_of(v, batch, 0, key_length, kv_head, KV_HEADS, DIM)
        first, count = field(items, n, 3), field(items, n, 4)
        entries = lists + head_at * capacity
        if LISTED:
            entries = lists + (head_at * blocks + block) * capacity
        # The only tile that may be on the diagonal: the last of a list, the first of offsets. Tiles
        # that a window cuts share its loop, since two loops with masks spill registers.
        last = first + count
        masked = first
        if LISTED:
            masked = last - 1
        one = tl.minimum(count, 1)
        steps = one * SPLIT
        if WINDOW > 0:
            cut = tl.minimum(first + FAR, last)
            steps += (last - cut) * SPLIT
        for s in range(0, steps):
            entry, part = masked, s
            if WINDOW > 0:
                part = s - s // SPLIT * SPLIT
                entry = tl.where(s < SPLIT, first, cut - 1 + s // SPLIT)
            keys = key_block(entries, entry, block, LISTED)
            passing = tl.where(block - keys == tl.load(diagonal), 0, BLOCK)
            if WINDOW > 0:
                passing = (block - keys - tl.load(diagonal)) * BLOCK
            at = (keys.to(tl.int64) * BLOCK + part * KEYS) * (KV_HEADS * DIM)
            k_tile = tl.load(k_head + at + key_offsets)
            v_tile = tl.load(v_head + at + key_offsets)
            limits = part * KEYS + tl.arange(0, KEYS) - passing
            state = STEP(state, queries, k_tile, v_tile, rows, limits, log2_scale, True, WINDOW)
        heads = k_head, v_head, entries
        if RUNS == 0:
            start, stop = first, last - one
            if not LISTED:
                start, stop = first + one, last
            if WINDOW > 0:
                stop = cut
            state = _over_run(
                STEP, state, queries, heads, start, stop, block, rows, log2_scale,
                KV_HEADS, DIM, LISTED, KEYS,
            )  # fmt: skip
        else:
            for run in range(RUNS):
                at = (head_at * RUNS + run) * blocks + block
                start, stop = tl.load(run_first + at), tl.load(run_last + at)
                # The first entry of the first nonempty run was the masked one.
                start += tl.where(start == first, one, 0)
                state = _over_run(
                    STEP, state, queries, heads, start, stop, block, rows, log2_scale,
                    KV_HEADS, DIM, LISTED, KEYS,
                )  # fmt: skip
    if HAS_COLUMNS:
        column_offsets = offsets(KEYS, HEADS, DIM)
        head_tokens = tokens + head_at * num_columns
        block_keep = keep + (head_at * blocks + block) * (num_columns // WORD)
        positions = tl.load(query_blocks + block) * BLOCK + rows
        for s in range(0, field(items, n, 5) * SPLIT):
            at = rows_of(k_columns, batch, s * KEYS, num_columns, head, HEADS, DIM)
            k_tile = tl.load(at + column_offsets)
            at = rows_of(v_columns, batch, s * KEYS, num_columns, head, HEADS, DIM)
            v_tile = tl.load(at + column_offsets)
            limits = seen_from(head_tokens, block_keep, s * KEYS, KEYS)
            state = STEP(state, queries, k_tile, v_tile, positions, limits, log2_scale, True, 0)
    return state


@triton.jit
def _over_run(
    STEP: tl.constexpr, state, queries, heads, start, stop, block, rows, log2_scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, LISTED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    k_head, v_head, entries = heads
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
        state = STEP(state, queries, k_tile, v_tile, rows, rows, log2_scale, False, 0)
    return state
