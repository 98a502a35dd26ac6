"""Documents from the attention mask of a Flax module."""

import numpy as np

from mtraining_jax.sparsity.documents import Documents


def documents_of(mask: np.ndarray, batch: int, block_size: int) -> Documents | None:
    """Finds the documents of a causal, block-diagonal mask.

    Args:
        mask: bool [S, S], or [..., H or 1, S, S] with the batch axes (or 1 each) before the heads;
            True where a query sees a key. Each query must see its document up to itself, or
            nothing if it is padding, equally for all heads.
        batch: B, the product of the batch axes.
        block_size: tokens per block.

    Returns:
        Documents of B sequences, or of one for all. None if the mask has another form.

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
    # The first key a token sees is the beginning of the document that extends to the token.
    last_begun = np.maximum.accumulate(np.where(begins | ~sees, tokens, 0), axis=-1)
    if (mask != wanted).any() or (sees & (first != last_begun)).any():
        return None
    return Documents.from_segment_ids(np.where(sees, begins.cumsum(-1), 0), block_size)
