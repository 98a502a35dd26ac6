"""Sparse attention as the `attention_fn` of Flax attention modules."""

import inspect
import math
from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from mtraining_jax.attention.api import sparse_attention
from mtraining_jax.attention.checks import check_is_pattern
from mtraining_jax.documents import Documents
from mtraining_jax.patterns.sampled_rows import SampledRows

_REASON = "sparse attention never materializes attention weights"


def attention_fn(*, assume_causal_mask: bool = False, **options: Any) -> Callable[..., Array]:
    """Returns a function for `attention_fn=` of Flax attention modules.

    Supports `flax.nnx.MultiHeadAttention` and `flax.linen.MultiHeadDotProductAttention`
    (`MultiHeadAttention`, `SelfAttention`). Attention is always causal and needs no mask.

    Args:
        assume_causal_mask: treat any mask as the causal mask, without reading it. By default a
            mask must be known at trace time (NumPy) and be causal, or causal within documents that
            begin at multiples of the pattern's block size. In the latter case it is converted to
            `documents`; tokens that see nothing are padding.
        **options: arguments of `sparse_attention` except `return_residuals`: pattern,
            sharding, ...

    Returns:
        A function `(query, key, value, *, mask=None, ...)` with the arguments of
        `flax.nnx.dot_product_attention` and `flax.linen.dot_product_attention`. Inputs are cast to
        `dtype`, or to their common dtype. `precision` and `force_fp32_for_softmax` have no effect:
        sums and softmax always use fp32. It raises ValueError for unsupported arguments: other
        masks, bias, dropout in training, decoding with a cache, `sow_weights`, custom einsums.

    Raises:
        ValueError: if an option is unknown.
    """
    if options.pop("return_residuals", False):
        raise ValueError(
            "return_residuals is not supported by attention_fn: Flax expects one output"
        )
    never = {"q", "k", "v", "return_residuals"}
    allowed = sorted(set(inspect.signature(sparse_attention).parameters) - never)
    if unknown := sorted(set(options) - set(allowed)):
        raise ValueError(
            f"attention_fn got an unknown option {unknown[0]!r}; choose from {', '.join(allowed)}"
        )
    causal = options.get("causal", True)
    block_size = check_is_pattern(options.get("pattern", SampledRows())).block_size

    # Linen passes only arguments that appear in the signature.
    def attend(
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype=None,
        precision=None,
        module=None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Callable | None = None,
        attn_weights_value_einsum: Callable | None = None,
    ) -> Array:
        einsums = qk_attn_weights_einsum, attn_weights_value_einsum
        refused = {
            f"bias must be None: {_REASON} to add it to": bias is not None,
            f"sow_weights must be False: {_REASON}": module is not None,
            f"dropout_rate={dropout_rate} must be 0, or deterministic=True: {_REASON} to drop "
            "from": dropout_rate > 0 and not deterministic,
            "qk_attn_weights_einsum_cls and attn_weights_value_einsum_cls must be None: sparse "
            "attention runs in kernels without einsum": einsums != (None, None),
            "is_causal=True contradicts causal=False of attention_fn": is_causal and not causal,
        }
        for sentence, given in refused.items():
            if given:
                raise ValueError(sentence)
        if causal and query.shape[-3] != key.shape[-3]:
            raise ValueError(
                f"query has {query.shape[-3]} tokens but key has {key.shape[-3]}: attention_fn "
                "does not support decoding with a cache (decode=True); use "
                "flax.nnx.dot_product_attention for it"
            )
        documents: Any = options.get("documents")
        if mask is not None and not (assume_causal_mask and causal):
            from_mask = _documents_of_mask(mask, query, causal, block_size)
            if from_mask is not None and documents is not None:
                raise ValueError("mask separates documents, and documents= is set too; pass one")
            documents = documents if from_mask is None else from_mask
        common = jnp.result_type(query, key, value) if dtype is None else dtype
        query, key, value = (x.astype(common) for x in (query, key, value))
        out = sparse_attention(query, key, value, **options | {"documents": documents})
        return cast(Array, out)  # a pair only with return_residuals

    return attend


def _documents_of_mask(
    mask: Array, query: Array, causal: bool, block_size: int
) -> Documents | None:
    """Returns the documents of a block-diagonal causal mask, None for the plain causal mask."""
    wanted = "None (attention is causal without it)" if causal else "None"
    if isinstance(mask, Tracer):
        raise ValueError(
            f"mask is a traced array; it must be {wanted}. If it is the causal mask, use "
            "attention_fn(assume_causal_mask=True)"
        )
    tokens = query.shape[-3]
    mask_array = np.asarray(mask)
    ranges = key_ranges(mask_array) if mask_array.shape[-2:] == (tokens, tokens) else None
    if ranges is not None:
        first, end = ranges
        if (first == 0).all() and (end == (np.arange(1, tokens + 1) if causal else tokens)).all():
            return None
        batch = math.prod(query.shape[:-3])
        documents = documents_of(first, end, batch, block_size) if causal else None
        if documents is not None:
            return documents
        positions, window = np.arange(tokens), tokens - int(first.flat[-1])
        is_window = (first == np.maximum(positions + 1 - window, 0)).all()
        if causal and is_window and (end == positions + 1).all():
            raise ValueError(
                f"mask of shape {mask_array.shape} is a sliding window of {window} tokens; it must "
                f"be None: pass pattern=SlidingWindow({window}) to attention_fn instead"
            )
    raise ValueError(
        f"mask of shape {mask_array.shape} is neither causal nor causal within documents; it must "
        f"be {wanted}. Padding at the end of a sequence needs no mask, since earlier tokens do not "
        "see it; a sliding window is pattern=SlidingWindow(window=W); other masks, such as those "
        "of a prefix LM, are not supported"
    )


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
