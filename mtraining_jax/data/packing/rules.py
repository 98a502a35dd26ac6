"""Packing algorithms: best fit, or consecutive documents."""

import numpy as np

# Documents packed together; with a million documents, few packs remain unfilled.
WINDOW = 2**20
# Documents up to this fraction (1 / 10) of a pack are short: they fill the gaps of long ones.
_SHORT = 10


def best_fit(blocks: np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit packing: each document goes to the fullest pack that has room for it.

    Maps the blocks of each document, int64 [d], 1 to `capacity`, to the index of its pack. Long
    documents are placed first, in decreasing order. Short ones (at most a tenth of a pack) follow
    in the given order and fill the gaps; mixed lengths keep packs similar. After Ding et al. (arXiv
    2404.10830), who sort all documents.
    """
    is_long = blocks * _SHORT > capacity
    long, short = np.flatnonzero(is_long), np.flatnonzero(~is_long)
    order = np.concatenate([long[np.argsort(-blocks[long], kind="stable")], short])
    # Python ints are fastest here.
    packs_with: list[list[int]] = [[] for _ in range(capacity + 1)]  # by number of free blocks
    rooms = opened = 0  # bit r of rooms: some pack has r free blocks
    placed = []
    for size in blocks[order].tolist():
        if fitting := rooms >> size:
            room = size + (fitting & -fitting).bit_length() - 1
            pack = packs_with[room].pop()
            if not packs_with[room]:
                rooms ^= 1 << room
        else:
            room, pack = capacity, opened
            opened += 1
        placed.append(pack)
        if left := room - size:
            packs_with[left].append(pack)
            rooms |= 1 << left
    packs = np.empty(blocks.shape, np.int64)
    packs[order] = placed
    return packs


def packed_order(blocks: np.ndarray, capacity: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs documents of `blocks`, int64 [d], in windows; shuffles packs and their documents.

    Returns the documents in order of packs [d], and their number up to the end of each pack.
    """
    rng = np.random.default_rng([seed, 0x7061636B])
    packs = np.empty(blocks.shape, np.int64)
    number = 0
    for start in range(0, blocks.size, WINDOW):
        window = start + rng.permutation(min(WINDOW, blocks.size - start))
        packs[window] = number + best_fit(blocks[window], capacity)
        number = int(packs[window].max()) + 1
    # Best fit opens packs with long documents first. Random document order balances the ring over
    # all positions of a sequence.
    packs = rng.permutation(number)[packs]
    order = np.lexsort((rng.random(blocks.size), packs))
    return order, np.cumsum(np.bincount(packs, minlength=number))


def chunked(starts: np.ndarray, lengths: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits documents, int64 [d] in tokens, every `longest` tokens into starts and lengths [p]."""
    pieces = -(-lengths // longest)
    within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    cut = within * longest
    return np.repeat(starts, pieces) + cut, np.minimum(np.repeat(lengths, pieces) - cut, longest)


def consecutive(
    starts: np.ndarray, lengths: np.ndarray, block_size: int, capacity: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packs consecutive documents, int64 [d] in tokens, aligned to blocks.

    Splits them at the ends of packs, and drops the last, incomplete pack. Returns starts and
    lengths of the pieces [p], and the number of pieces up to the end of each pack.
    """
    blocks = -(-lengths // block_size)
    ends = np.cumsum(blocks)
    packs = int(ends[-1]) // capacity if ends.size else 0
    borders = capacity * np.arange(packs + 1)
    begins = np.unique(np.concatenate([ends - blocks, borders]))
    begins = begins[begins < borders[-1]]
    document = np.searchsorted(ends, begins, side="right")
    skipped = (begins - (ends - blocks)[document]) * block_size
    room = (np.concatenate([begins[1:], borders[-1:]]) - begins) * block_size
    return (
        starts[document] + skipped,
        np.minimum(lengths[document] - skipped, room),
        np.searchsorted(begins, borders[1:]),
    )
