"""What `sparse_attention` refuses, in sentences that name the argument."""

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from mtraining_jax.attention.placement import Placement
from mtraining_jax.sparsity import Pattern
from mtraining_jax.sparsity.document_blocks import DocumentBlocks
from mtraining_jax.sparsity.documents import Documents
from pallas_kernels.index import Index


def nearest(length: int, unit: int) -> str:
    """In words, the multiples of `unit` next to a length that is not one."""
    below = length // unit * unit
    return f"{below} and {below + unit}" if below else f"{unit}"


def check_arrays(q: Array, k: Array, v: Array, causal: bool) -> None:
    """Checks shapes and dtypes of the inputs, without the mesh.

    Raises:
        ValueError: naming the argument.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not hasattr(x, "ndim") or not hasattr(x, "dtype"):
            raise ValueError(
                f"{name} is a {type(x).__name__}: an array [..., tokens, heads, dim] is needed"
            )
        if x.ndim < 3:
            raise ValueError(
                f"{name} has shape {x.shape}: [batch, tokens, heads, dim] is needed, batch optional"
            )
        if 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}: no axis may be empty")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"{name} has dtype {x.dtype}: bfloat16, float16 or float32 is needed"
            )
        if x.dtype != q.dtype:
            raise ValueError(
                f"{name} has dtype {x.dtype} but q {q.dtype}: they must be equal; cast one of them"
            )
    if k.shape != v.shape:
        raise ValueError(f"v has shape {v.shape} but k {k.shape}: they must be equal")
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(
            f"k has batch axes {k.shape[:-3]} but q {q.shape[:-3]}: they must be equal"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"k has head dim {k.shape[-1]} but q {q.shape[-1]}: they must be equal"
        )
    if q.shape[-2] % k.shape[-2]:
        heads, kv_heads = q.shape[-2], k.shape[-2]
        raise ValueError(
            f"q has {heads} heads: a multiple of the {kv_heads} heads of k is needed; nearest: "
            f"{nearest(heads, kv_heads)}"
        )
    if causal and q.shape[-3] != k.shape[-3]:
        raise ValueError(
            f"k has {k.shape[-3]} tokens but q {q.shape[-3]}: causal attention needs as many; "
            "lengths may differ with pattern=Dense(), causal=False"
        )


def check_scale(scale: float | None, q: Array) -> float:
    """The scale of the logits as a number.

    Raises:
        ValueError: if it is traced or not positive.
    """
    if scale is None:
        return q.shape[-1] ** -0.5
    if isinstance(scale, jax.core.Tracer):
        raise ValueError(
            "scale is a traced array: it must be a number when tracing; multiply q by the array"
        )
    if not float(scale) > 0:
        raise ValueError(f"scale={scale} must be positive")
    return float(scale)


def check_is_pattern(pattern: object) -> None:
    """Checks that `pattern` is a pattern or an index, whatever the inputs.

    Raises:
        ValueError: if it is neither.
    """
    if not isinstance(pattern, (Pattern, Index)):
        made = f"; {pattern.__name__}() makes one" if isinstance(pattern, type) else ""
        raise ValueError(
            f"pattern={pattern!r} must be a Pattern, such as SampledRows(tau=0.9), VerticalSlash() "
            f"or Dense(), or an index{made}"
        )


def check_pattern(pattern: object, q: Array, causal: bool) -> None:
    """Checks that `pattern` can be used on these inputs.

    Raises:
        ValueError: naming what does not fit.
    """
    check_is_pattern(pattern)
    if isinstance(pattern, Index):
        _check_index(pattern, q)
    else:
        _check_hashable(pattern)
        _check_pattern_arrays(pattern, q.shape[-2])
    also_not_causal = pattern.also_not_causal if isinstance(pattern, Pattern) else True
    if not causal and not also_not_causal:
        raise ValueError(
            f"causal=False needs pattern=Dense() or AdaSpa(), not {type(pattern).__name__}, whose "
            "pairs are causal"
        )
    if isinstance(pattern, Index) and pattern.causal != causal:
        raise ValueError(f"pattern is an index with causal={pattern.causal}, but causal={causal}")


def check_valid_len(valid_len: ArrayLike | None, seq_len: int, causal: bool) -> Array | None:
    """The number of tokens before padding as int32, None if there is none.

    Raises:
        ValueError: if it is not one integer from 1 to S, as far as it is known when tracing, or if
            tokens could see the padding.
    """
    if valid_len is None:
        return None
    if not causal:
        raise ValueError("valid_len needs causal=True: otherwise tokens see the padding")
    shape, dtype = jnp.shape(valid_len), jnp.result_type(valid_len)
    if shape or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"valid_len is {dtype} {list(shape)}: one integer is needed")
    if not isinstance(valid_len, jax.core.Tracer) and not 1 <= int(valid_len) <= seq_len:
        raise ValueError(f"valid_len={int(valid_len)} must be from 1 to {seq_len}, the tokens of q")
    return jnp.asarray(valid_len, jnp.int32)


def check_documents(
    documents: Documents | None, q: Array, block_size: int, causal: bool, valid_len: object
) -> DocumentBlocks | None:
    """The document of each block of q's sequences, None if each sequence is one.

    Raises:
        ValueError: if the documents are not those of such sequences, or say less than is needed.
    """
    if documents is None:
        return None
    if not isinstance(documents, Documents):
        raise ValueError(
            f"documents is a {type(documents).__name__}: make Documents, with "
            "Documents.from_segment_ids, from_cu_seqlens or from_lengths"
        )
    if not causal:
        raise ValueError("documents need causal=True: the pairs of other attention cross them")
    if valid_len is not None:
        raise ValueError(
            "valid_len has no place beside documents, which say how many tokens of each count"
        )
    if documents.block_size != block_size:
        raise ValueError(
            f"documents have block_size={documents.block_size}, but the pattern {block_size}: they "
            "must be equal"
        )
    table, batch = documents.table, math.prod(q.shape[:-3])
    # Under `jax.vmap` one sequence has a table without a batch.
    table = table[None] if q.ndim == 3 and jnp.ndim(table) == 2 else table
    shape = jnp.shape(table)
    num_blocks = q.shape[-3] // block_size
    if len(shape) != 3 or shape[0] not in (1, batch) or shape[1:] != (num_blocks, 3):
        raise ValueError(
            f"documents are a table {list(shape)}: [{batch}, {num_blocks}, 3] is needed, for "
            f"{batch} sequences of {q.shape[-3]} tokens, as in q"
        )
    return DocumentBlocks.from_table(jnp.broadcast_to(table, (batch, num_blocks, 3)))


def _check_hashable(pattern: Pattern) -> None:
    """A pattern without arrays is an argument of `jax.jit` that is known when tracing."""
    if pattern.arrays:
        return
    try:
        hash(pattern)
    except TypeError as error:
        raise ValueError(
            f"pattern={type(pattern).__name__}(...) cannot be hashed ({error}): make its class a "
            "frozen dataclass, @dataclasses.dataclass(frozen=True), with fields that can"
        ) from None


def _check_index(index: Index, q: Array) -> None:
    batch = math.prod(q.shape[:-3])
    for path, leaf in jax.tree_util.tree_leaves_with_path(index):
        have, need = leaf.shape[:2], (batch, q.shape[-2])
        if have != need:
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"pattern{name} is for [batch, heads] = {list(have)}: {list(need)} is needed, as "
                "in q"
            )


def _check_pattern_arrays(pattern: Pattern, num_heads: int) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(pattern):
        if leaf is pattern:
            return
        shape = jnp.shape(leaf)
        if shape[:1] != (num_heads,) or len(path) != 1:
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"pattern{name} has shape {shape}: an array with one entry for each of the "
                f"{num_heads} query heads is needed"
            )


def check_division(q: Array, k: Array, block_size: int, placement: Placement) -> None:
    """Checks that blocks divide the tokens, and devices the blocks, the batch and the heads.

    Args:
        q: queries.
        k: keys.
        block_size: g.
        placement: axes of the mesh, from `find_placement`.

    Raises:
        ValueError: naming the axis, with the nearest lengths that would be right.
    """
    unit = block_size * placement.ranks
    for name, x in (("q", q), ("k", k)):
        if x.shape[-3] % unit or not x.shape[-3]:
            reason = f"block_size={block_size}"
            if placement.ranks > 1:
                reason = (
                    f"{reason} x {placement.ranks} devices on sequence_axes={placement.sequence}"
                )
            raise ValueError(
                f"{name} has {x.shape[-3]} tokens: a multiple of {unit} ({reason}) is needed; "
                f"nearest: {nearest(x.shape[-3], unit)}"
            )
    if placement.mesh is None:
        return
    if q.ndim > 4:
        raise ValueError(f"q has shape {q.shape}: over a mesh, one batch axis at most is possible")
    batch, devices = (q.shape[0] if q.ndim == 4 else 1), placement.size(placement.batch)
    if batch % devices:
        raise ValueError(
            f"q has batch {batch}: a multiple of the {devices} devices on "
            f"batch_axis={placement.batch} is needed; nearest: {nearest(batch, devices)}, or "
            "batch_axis=()"
        )
    kv_heads, devices = k.shape[-2], placement.size(placement.heads)
    if kv_heads % devices:
        raise ValueError(
            f"k has {kv_heads} heads: a multiple of the {devices} devices on "
            f"head_axis={placement.heads} is needed; nearest: {nearest(kv_heads, devices)}, or "
            "head_axis=()"
        )
