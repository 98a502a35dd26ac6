"""Sparse attention as the `attention_fn` of Flax's own attention modules."""

import inspect
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mtraining_jax.attention.api import sparse_attention
from mtraining_jax.attention.checks import check_is_pattern
from mtraining_jax.attention.document_masks import documents_of
from mtraining_jax.sparsity import SampledRows
from mtraining_jax.sparsity.documents import Documents

_REASON = "sparse attention computes no matrix of weights"


def attention_fn(*, assume_causal_mask: bool = False, **options) -> Callable[..., Array]:
    """A function for `attention_fn=` of Flax's attention modules.

    It serves `flax.nnx.MultiHeadAttention` and `flax.linen.MultiHeadDotProductAttention`
    (`MultiHeadAttention`, `SelfAttention`). Attention is causal whatever the module is told:
    `is_causal` may be passed or not, and no mask need be made.

    Args:
        assume_causal_mask: whether a mask that is passed is promised to be the
            causal one, and ignored. Otherwise a mask is accepted only if its values are known
            when tracing (NumPy) and it is causal, or causal within documents that begin at
            multiples of the pattern's block size (tokens that see nothing are padding). It is read
            as `documents` then.
        **options: for `sparse_attention`, without the returns: pattern, mesh, layout, ...

    Returns:
        A function `(query, key, value, *, mask=None, ...)` with the arguments of
        `flax.nnx.dot_product_attention` and `flax.linen.dot_product_attention`. query
        [..., S, Hq, D]; key, value [..., S, Hk, D]; result [..., S, Hq, D]. Inputs are cast to
        `dtype`, or to their common type without it. `precision` and `force_fp32_for_softmax` are
        accepted and change nothing: sums and softmax are fp32 anyway. It raises ValueError for
        what sparse attention cannot do: other masks, bias, dropout in training, decoding with a
        cache, weights for `sow_weights`, other einsums.

    Raises:
        ValueError: if an option is not one of these.
    """
    for name in ("return_lse", "return_index"):
        if options.get(name):
            raise ValueError(f"{name} has no place in attention_fn: Flax expects the output alone")
    allowed = set(inspect.signature(sparse_attention).parameters) - {"q", "k", "v"}
    if unknown := sorted(set(options) - allowed):
        raise ValueError(f"{unknown[0]} is not an option of attention_fn; {_listed(allowed)} are")
    causal = options.get("causal", True)
    pattern = options.get("pattern", SampledRows())
    check_is_pattern(pattern)
    block_size = pattern.block_size

    # Linen passes only what the signature names.
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
        if bias is not None:
            raise ValueError(f"bias must be None: {_REASON} to add it to")
        if module is not None:
            raise ValueError(f"sow_weights must be False: {_REASON}")
        if dropout_rate > 0 and not deterministic:
            raise ValueError(
                f"dropout_rate={dropout_rate} must be 0, or deterministic=True: {_REASON} to drop "
                "from"
            )
        if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
            raise ValueError(
                "qk_attn_weights_einsum_cls and attn_weights_value_einsum_cls must be None: the "
                "kernels have no einsum"
            )
        if is_causal and not causal:
            raise ValueError("is_causal=True contradicts causal=False of attention_fn")
        told = None
        if mask is not None and not (assume_causal_mask and causal):
            told = _documents_of_mask(mask, query, causal, block_size)
        common = jnp.result_type(query, key, value) if dtype is None else dtype
        query, key, value = (x.astype(common) for x in (query, key, value))
        return sparse_attention(query, key, value, **_with_documents(options, told))

    return attend


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names - {"return_lse", "return_index"}))


def _with_documents(options: dict, told: Documents | None) -> dict:
    """The options with documents that a mask told, if it told any."""
    if told is None:
        return options
    if options.get("documents") is not None:
        raise ValueError("mask keeps documents apart, and so does documents=: give one of the two")
    return options | {"documents": told}


def _documents_of_mask(
    mask: Array, query: Array, causal: bool, block_size: int
) -> Documents | None:
    """Accepts a causal mask, which changes nothing, or one that is so within documents.

    Raises:
        ValueError: if the mask is another one, or its values are not known.
    """
    wanted = "None (attention is causal without it)" if causal else "None"
    if isinstance(mask, jax.core.Tracer):
        raise ValueError(
            f"mask is a traced array: it must be {wanted}; if it is the causal mask, say so with "
            "attention_fn(assume_causal_mask=True). Decoding with a cache is not possible"
        )
    tokens = query.shape[-3]
    values = np.asarray(mask).astype(bool)
    expected = np.ones((tokens, tokens), bool)
    if causal:
        expected = np.tril(expected)
    if values.shape[-2:] == expected.shape:
        if (values == expected).all():
            return None
        batch = math.prod(query.shape[:-3])
        told = documents_of(values, batch, block_size) if causal else None
        if told is not None:
            return told
    raise ValueError(
        f"mask of shape {values.shape} masks more or less than causal attention, and than that "
        f"within documents: it must be {wanted}; padding at the end of a sequence needs no mask, "
        "since earlier tokens do not see it"
    )
