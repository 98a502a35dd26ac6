"""Which documents share a sequence: best fit in blocks, or one after the other."""

import numpy as np

# Documents that are packed together. Packs of one window do not wait for the next one, and a
# million documents leave few packs open.
WINDOW = 2**20
# Documents of at most this part of a pack fill what is left by longer ones.
_SHORT = 10


def best_fit(blocks: np.ndarray, capacity: int) -> np.ndarray:
    """Packs documents by best fit: each goes where the least room is left that is enough.

    Long documents come first, the longest ahead. Short ones, of at most a tenth of a pack, follow
    in the order given: they fill what is left of any pack, and mixed lengths keep packs alike.
    Only long documents can waste more than a tenth of all packs, and packs of these are at most
    11/9 of the fewest possible (best fit decreasing). Packing text so is of Ding and others (arXiv
    2404.10830), with all documents in decreasing order.

    Args:
        blocks: int64 [d], blocks of each document, from 1 to `capacity`.
        capacity: blocks of a pack.

    Returns:
        int64 [d]: the pack of each, from 0; no pack is empty.
    """
    packs = np.empty(blocks.shape, np.int64)
    is_long = blocks * _SHORT > capacity
    rooms = _Rooms(capacity)
    _place_long(np.flatnonzero(is_long), blocks, rooms, packs)
    # One step for each document, in Python's own numbers: 2 to 3 microseconds.
    short = np.flatnonzero(~is_long)
    packs[short] = [rooms.place(size) for size in blocks[short].tolist()]
    return packs


class _Rooms:
    """Packs that are not full, by the blocks that are free in them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._packs: dict[int, list[int]] = {}
        self._bits = 0  # bit r: there are packs with r blocks free
        self.opened = 0

    def take(self, size: int) -> tuple[int, list[int]]:
        """The least room of at least `size`, and all packs that have it; a new pack if none."""
        fitting = self._bits >> size
        if not fitting:
            self.opened += 1
            return self._capacity, [self.opened - 1]
        room = size + (fitting & -fitting).bit_length() - 1
        self._bits ^= 1 << room
        return room, self._packs.pop(room)

    def give(self, room: int, packs: list[int]) -> None:
        """Puts packs back that have so much room."""
        if room and packs:
            self._packs.setdefault(room, []).extend(packs)
            self._bits |= 1 << room

    def place(self, size: int) -> int:
        """Places one document; returns its pack."""
        room, packs = self.take(size)
        pack = packs.pop()
        self.give(room, packs)
        self.give(room - size, [pack])
        return pack


def _place_long(which: np.ndarray, blocks: np.ndarray, rooms: _Rooms, packs: np.ndarray) -> None:
    """Best fit decreasing; documents of one length at a time, as many as each pack takes."""
    left = which[np.argsort(-blocks[which], kind="stable")].tolist()
    sizes, counts = np.unique(blocks[which], return_counts=True)
    begin = 0
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = begin + count
        while begin < end:
            room, found = rooms.take(size)
            each = room // size
            while found and begin < end:
                placed = min(each, end - begin)
                pack = found.pop()
                packs[left[begin : begin + placed]] = pack
                rooms.give(room - placed * size, [pack])
                begin += placed
            rooms.give(room, found)


def packed_order(blocks: np.ndarray, capacity: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs any number of documents, a window at a time, and puts them in random order.

    Documents lie in a pack in random order, so that the work of a ring is as even at the end of
    packs as at their beginning; packs follow each other in random order, as best fit opens those
    of long documents first.

    Args:
        blocks: int64 [d], blocks of each document, from 1 to `capacity`.
        capacity: blocks of a pack.
        seed: of both orders, and of the choice between documents of one length.

    Returns:
        ``(order, ends)``, int64 [d] and [packs]: the documents in order of packs and of their
        places, and how many there are up to the end of each pack.
    """
    rng = np.random.default_rng([seed, 0x7061636B])
    packs = np.empty(blocks.shape, np.int64)
    number = 0
    for start in range(0, blocks.size, WINDOW):
        window = start + rng.permutation(min(WINDOW, blocks.size - start))
        packs[window] = number + best_fit(blocks[window], capacity)
        number = int(packs[window].max()) + 1
    packs = rng.permutation(number)[packs]
    order = np.lexsort((rng.random(blocks.size), packs))
    return order, np.cumsum(np.bincount(packs, minlength=number))


def chunked(starts: np.ndarray, lengths: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts documents every `longest` tokens.

    Args:
        starts, lengths: int64 [d], tokens; lengths are at least 1.
        longest: tokens of a piece at most.

    Returns:
        Starts and lengths of the pieces, int64 [p] each, in the order of documents.
    """
    pieces = -(-lengths // longest)
    ends = np.cumsum(pieces)
    within = np.arange(ends[-1] if ends.size else 0) - np.repeat(ends - pieces, pieces)
    cut = within * longest
    return (
        np.repeat(starts, pieces) + cut,
        np.minimum(np.repeat(lengths, pieces) - cut, longest),
    )


def consecutive(
    starts: np.ndarray, lengths: np.ndarray, block_size: int, capacity: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lays documents one after the other, each from a block's beginning, and cuts every pack.

    What goes over the end of a pack is a piece of its own in the next one. Documents at the end
    that do not fill a pack are dropped.

    Args:
        starts, lengths: int64 [d], tokens; lengths are at least 1.
        block_size: g, tokens of a block.
        capacity: blocks of a pack.

    Returns:
        ``(starts, lengths, ends)`` of pieces, int64 [p], [p] and [packs]: as documents, and how
        many there are up to the end of each pack.
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
