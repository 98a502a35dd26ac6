"""Common parts of the Triton kernels: 64-bit addresses (of over 2^31 elements) and tile masks."""

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
