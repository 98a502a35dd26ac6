"""Documents from a mask, as Flax's attention modules are given one."""

import numpy as np

from mtraining_jax.sparsity.documents import Documents


def documents_of(mask: np.ndarray, batch: int, block_size: int) -> Documents | None:
    """The documents that a causal mask keeps apart.

    Args:
        mask: bool [S, S], or [..., H or 1, S, S] with the batch's axes, or 1 each, before the
            heads: True where a query sees a key. A query sees the keys from the first one of its
            document up to itself, or none if it is padding; the same for all heads.
        batch: B, the product of the batch's axes.
        block_size: g.

    Returns:
        Documents of B sequences, or of one for all. None if the mask is another one.

    Raises:
        UserError: if a document does not begin at a multiple of the block size.
    """
    mask = mask.reshape(-1, 1, *mask.shape) if mask.ndim == 2 else mask
    mask = mask.reshape(-1, *mask.shape[-3:])
    if mask.shape[0] not in (1, batch) or (mask != mask[:, :1]).any():
        return None
    mask = mask[:, 0]
    tokens = np.arange(mask.shape[-1])
    sees, first = mask.any(-1), mask.argmax(-1)
    wanted = sees[..., None] & (tokens >= first[..., None]) & (tokens <= tokens[:, None])
    begins = sees & (first == tokens)
    # Every token's first key begins the document that goes on up to the token.
    last_begun = np.maximum.accumulate(np.where(begins | ~sees, tokens, 0), axis=-1)
    if (mask != wanted).any() or (sees & (first != last_begun)).any():
        return None
    return Documents.from_segment_ids(np.where(sees, begins.cumsum(-1), 0), block_size)
