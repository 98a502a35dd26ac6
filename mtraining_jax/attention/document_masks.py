"""Documents from the attention mask of a Flax module."""

import numpy as np

from mtraining_jax.documents import Documents

_MOST_ENTRIES = 1 << 22  # of a mask, read at a time


def key_ranges(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the first key and the end that each query of a mask [..., S, S] sees, int64 [..., S].

    They are equal for a query that sees nothing. None if a query skips keys in its range.
    """
    tokens = mask.shape[-1]
    first, end = (np.empty(mask.shape[:-1], np.int64) for _ in range(2))
    step = max(1, _MOST_ENTRIES * mask.shape[-2] // max(1, mask.size))
    for start in range(0, mask.shape[-2], step):
        rows = slice(start, start + step)
        seen = mask[..., rows, :].astype(bool, copy=False)
        first[..., rows] = seen.argmax(-1)
        last = tokens - seen[..., ::-1].argmax(-1)
        end[..., rows] = np.where(seen.any(-1), last, first[..., rows])
        if (np.count_nonzero(seen, axis=-1) != end[..., rows] - first[..., rows]).any():
            return None
    return first, end


def documents_of(
    first: np.ndarray, end: np.ndarray, batch: int, block_size: int
) -> Documents | None:
    """Finds the documents of a causal, block-diagonal mask from its `key_ranges`.

    The ranges are [S], or [..., H or 1, S] with the batch axes (or 1 each) before the heads. The
    documents are of `batch` sequences, or of one for all; None if the mask has another form.

    Raises:
        UserError: if a document does not begin at a multiple of the block size.
    """
    if first.ndim == 1:
        first, end = first[None], end[None]
    first, end = (x.reshape(-1, *x.shape[-2:]) for x in (first, end))
    if first.shape[0] not in (1, batch):
        return None
    if (first != first[:, :1]).any() or (end != end[:, :1]).any():
        return None
    first, end = first[:, 0], end[:, 0]
    tokens = np.arange(first.shape[-1])
    sees = end > first
    begins = sees & (first == tokens)
    # The first key a token sees begins its document, and lies after all padding before the token.
    earliest = np.where(begins, tokens, np.where(sees, 0, tokens + 1))
    last_begun = np.maximum.accumulate(earliest, axis=-1)
    if (sees & ((end != tokens + 1) | (first != last_begun))).any():
        return None
    return Documents.from_segment_ids(np.where(sees, begins.cumsum(-1), 0), block_size)
