"""Triton kernels that score key blocks by probe queries; a program is one block and its heads."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

_WIDTH = tl.constexpr(32)  # warp width
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # lowest finite fp32 number


@triton.jit
def _keys_of(k, HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr):
    """Returns a program's batch entry, key/value head and block, and its keys [KEYS, DIM]."""
    batch, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    block, blocks = tl.program_id(1), tl.num_programs(1)
    first = (batch * blocks + block) * (KEYS * HEADS * DIM) + head * DIM
    offsets = tl.arange(0, KEYS)[:, None] * (HEADS * DIM) + tl.arange(0, DIM)[None, :]
    return batch, head, block, tl.load(k + first + offsets)


@triton.jit
def estimate_statistics(
    q, k, shifts, queries,
    peak, total,
    log2_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Computes peak and total, fp32 [B, HEADS, n, ROWS], of each query of a tile.

    `shifts`, int32 [B, n], are distances from the first key of a block to the first query.
    """
    batch, kv_head, block, keys = _keys_of(k, KV_HEADS, DIM, KEYS)
    blocks = tl.num_programs(1)
    shift, own = tl.load(shifts + batch * blocks + block), tl.load(queries + batch)
    rows = tl.arange(0, ROWS)
    seen = rows[:, None] + shift >= tl.arange(0, KEYS)[None, :]
    offsets = rows[:, None] * DIM + tl.arange(0, DIM)[None, :]
    first_head = kv_head * (HEADS // KV_HEADS)
    for member in range(HEADS // KV_HEADS):
        head = first_head + member
        q_tile = tl.load(q + (own.to(tl.int64) * HEADS + head) * (ROWS * DIM) + offsets)
        logits = tl.where(seen, tl.dot(q_tile, tl.trans(keys)), float("-inf"))
        highest = tl.maximum(tl.max(logits, 1), _LOWEST)
        terms = tl.exp2((logits - highest[:, None]) * log2_scale)
        at = ((batch * HEADS + head) * blocks + block) * ROWS + rows
        tl.store(peak + at, highest)
        tl.store(total + at, tl.sum(terms, 1))


@triton.jit
def estimate_masses(
    q, k, shifts, queries, peak, to_mass,
    columns, own_diagonals, beyond,
    log2_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Sums weights exp2(log2_scale (q k - peak)) to_mass over a tile's columns and diagonals."""
    batch, kv_head, block, keys = _keys_of(k, KV_HEADS, DIM, KEYS)
    blocks = tl.num_programs(1)
    shift, own = tl.load(shifts + batch * blocks + block), tl.load(queries + batch)
    rows, slots = tl.arange(0, ROWS), tl.arange(0, KEYS)
    seen = rows[None, :] + shift >= slots[:, None]
    offsets = rows[:, None] * DIM + tl.arange(0, DIM)[None, :]
    # Key j and row u are on diagonal j + ROWS - 1 - u, so the weights of a row move `distance`
    # slots further on. Here a row is rotated only within parts of a warp's width, for which lanes
    # exchange each weight once. The rest is a number of whole parts, `carried`; rows with the same
    # number are summed first, and only their sums are moved.
    PARTS: tl.constexpr = KEYS // _WIDTH
    distance, place = ROWS - 1 - rows[:, None, None], tl.arange(0, _WIDTH)[None, None, :]
    turned = tl.broadcast_to((place - distance + ROWS) % _WIDTH, [ROWS, PARTS, _WIDTH])
    carried = distance // _WIDTH + (place < distance % _WIDTH)
    part = tl.broadcast_to(tl.arange(0, PARTS)[:, None], [PARTS, _WIDTH])
    first_head = kv_head * (HEADS // KV_HEADS)
    for member in range(HEADS // KV_HEADS):
        head = first_head + member
        row_at = own.to(tl.int64) * HEADS + head
        q_tile = tl.load(q + row_at * (ROWS * DIM) + offsets)
        row_peak = tl.load(peak + row_at * ROWS + rows)
        row_to_mass = tl.load(to_mass + row_at * ROWS + rows)
        # Keys are the rows of the product: sums over queries then need fewer lane exchanges.
        logits = tl.dot(keys, tl.trans(q_tile))
        weights = tl.exp2((logits - row_peak[None, :]) * log2_scale) * row_to_mass[None, :]
        # Masks weights instead of logits: the peak of a query that sees nothing is arbitrary.
        weights = tl.where(seen, weights, 0.0)
        skewed = tl.reshape(tl.trans(weights), [ROWS, PARTS, _WIDTH])
        skewed = tl.gather(skewed, turned, 2)
        on_own = tl.sum(tl.where(carried == 0, skewed, 0.0), 0)
        on_next = tl.zeros([PARTS, _WIDTH], tl.float32)
        for parts in tl.static_range(1, ROWS // _WIDTH + 1):
            moved = tl.sum(tl.where(carried == parts, skewed, 0.0), 0)
            moved = tl.gather(moved, (part - parts + PARTS) % PARTS, 0)
            on_own += tl.where(part >= parts, moved, 0.0)
            on_next += tl.where(part >= parts, 0.0, moved)
        at = ((batch * HEADS + head) * blocks + block) * KEYS + slots
        tl.store(columns + at, tl.sum(weights, 1))
        tl.store(own_diagonals + at, tl.reshape(on_own, [KEYS]))
        tl.store(beyond + at, tl.reshape(on_next, [KEYS]))
