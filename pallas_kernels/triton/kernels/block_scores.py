"""Triton kernel that scores key blocks: the logarithm of the weight that a row gives to each."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

_WHOLE = tl.constexpr(128)  # longest rows that are multiplied at once
_DEPTH = tl.constexpr(64)  # components of longer rows that are multiplied at a time


@triton.jit
def block_scores(
    q, k, places, starts,
    scores, peak,
    log2_scale, num_rows, num_keys,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, LENGTH: tl.constexpr, COLUMNS: tl.constexpr,
    ONE_FOR_ALL: tl.constexpr, HAS_STARTS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Implements `BlockScores.scores` for ROWS rows of one head; COLUMNS is a power of two."""
    # Later rows see more keys, so they come first.
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    rows = tile * ROWS + tl.arange(0, ROWS)
    own = 0 if ONE_FOR_ALL else batch * num_rows
    last = tl.load(places + own + rows)
    head_at = batch * HEADS + head
    DEPTH: tl.constexpr = LENGTH if LENGTH <= _WHOLE else _DEPTH
    depth, keys = tl.arange(0, DEPTH), tl.arange(0, KEYS)
    q_at = q + (head_at * num_rows + tile * ROWS) * LENGTH
    q_at += tl.arange(0, ROWS)[:, None] * LENGTH + depth[None, :]
    k_at = k + (batch * KV_HEADS + head // (HEADS // KV_HEADS)) * num_keys * LENGTH
    k_at += keys[:, None] * LENGTH + depth[None, :]
    if DEPTH == LENGTH:
        q_tile = tl.load(q_at)
    BLOCKS: tl.constexpr = KEYS // COLUMNS
    score_rows = scores + head_at * (num_keys // COLUMNS) * num_rows
    block_numbers = tl.arange(0, BLOCKS)
    begin, first = tl.zeros([ROWS], tl.int32), 0
    if HAS_STARTS:
        begin = tl.load(starts + batch * num_rows + rows)
        first = tl.min(begin) // KEYS
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    for step in range(first, tl.max(last) // KEYS + 1):
        if DEPTH == LENGTH:
            products = tl.dot(q_tile, tl.trans(tl.load(k_at + step * (KEYS * LENGTH))))
        else:
            products = tl.zeros([ROWS, KEYS], tl.float32)
            for part in range(LENGTH // DEPTH):
                q_part = tl.load(q_at + part * DEPTH)
                k_part = tl.load(k_at + (step * (KEYS * LENGTH) + part * DEPTH))
                products = tl.dot(q_part, tl.trans(k_part), products)
        numbers = step * KEYS + keys
        seen = (numbers[None, :] <= last[:, None]) & (numbers[None, :] >= begin[:, None])
        logits = tl.where(seen, products * log2_scale, float("-inf"))
        logits = tl.reshape(logits, [ROWS, BLOCKS, COLUMNS])
        block_peak = tl.max(logits, 2)
        base = tl.where(block_peak > float("-inf"), block_peak, 0.0)
        score = block_peak + tl.log2(tl.sum(tl.exp2(logits - base[:, :, None]), 2))
        score = tl.where(block_peak > float("-inf"), score, float("-inf"))
        blocks = step * BLOCKS + block_numbers
        tl.store(score_rows + blocks[None, :] * num_rows.to(tl.int64) + rows[:, None], score)
        highest = tl.maximum(highest, tl.max(block_peak, 1))
    tl.store(peak + head_at * num_rows + rows, highest)
