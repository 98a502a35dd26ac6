"""Argument checks of `sparse_attention`."""

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from mtraining_jax.attention.placement import Placement, Sharding
from mtraining_jax.documents import Documents
from mtraining_jax.parallel.ring import check_ring
from mtraining_jax.patterns.base import Pattern
from mtraining_jax.utils.fields import shortened
from mtraining_jax.utils.text import nearest_multiples
from pallas_kernels.index import Index


def check_arrays(q: Array, k: Array, v: Array, causal: bool) -> None:
    """Checks shapes and dtypes of the inputs, independently of the mesh."""
    if not isinstance(causal, bool):
        raise ValueError(f"causal={shortened(repr(causal))} must be True or False")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not hasattr(x, "ndim") or not hasattr(x, "dtype"):
            raise ValueError(
                f"{name} is a {type(x).__name__}; expected an array [..., tokens, heads, dim]"
            )
        if x.ndim < 3:
            raise ValueError(
                f"{name} has shape {x.shape}; expected [batch, tokens, heads, dim], batch optional"
            )
        if 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}; empty axes are not supported")
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:  # float8 and less
            raise ValueError(f"{name} has dtype {x.dtype}; it must be bfloat16, float16 or float32")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {x.dtype} but q has {q.dtype}; cast one of them")
    if k.shape != v.shape:
        raise ValueError(f"v has shape {v.shape} but k has {k.shape}; they must be equal")
    for axes, have, need in (
        ("batch axes", k.shape[:-3], q.shape[:-3]),
        ("head dim", k.shape[-1], q.shape[-1]),
    ):
        if have != need:
            raise ValueError(f"k has {axes} {have} but q has {need}; they must be equal")
    if q.shape[-2] % k.shape[-2]:
        heads, kv_heads = q.shape[-2], k.shape[-2]
        raise ValueError(
            f"q has {heads} heads; expected a multiple of the {kv_heads} heads of k, such as "
            f"{nearest_multiples(heads, kv_heads)}"
        )
    if causal and q.shape[-3] != k.shape[-3]:
        raise ValueError(
            f"k has {k.shape[-3]} tokens but q has {q.shape[-3]}; causal attention needs equal "
            "lengths. For cross-attention use pattern=Dense(), causal=False"
        )


def check_scale(scale: float | None, q: Array) -> float:
    """Returns the scale of the logits as a float."""
    if scale is None:
        return q.shape[-1] ** -0.5
    if isinstance(scale, Tracer):
        raise ValueError(
            "scale is a traced array; pass a Python number, or multiply q by the array"
        )
    try:
        number = float(scale)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"scale={shortened(repr(scale))} must be a positive number")
    return number


def check_sharding(sharding: object) -> Sharding:
    """Returns where the arrays are; None leaves it to their types."""
    if not isinstance(sharding, Sharding | None):
        raise ValueError(
            f"sharding is a {type(sharding).__name__}; it must be a mtraining_jax.Sharding, such "
            "as Sharding(mesh, sequence=('node', 'device'), batch='data'), or None"
        )
    sharding = sharding or Sharding()
    check_ring(sharding.ring, "sharding.ring")
    return sharding


def check_sinks(sinks: ArrayLike | None, q: Array) -> Array | None:
    """Returns the logits of attention sinks as finite fp32, or None."""
    if sinks is None:
        return None
    heads, sinks = q.shape[-2], jnp.asarray(sinks)
    if sinks.shape != (heads,):
        shape = list(sinks.shape)
        raise ValueError(f"sinks has shape {shape}; expected [{heads}], one per head of q")
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(f"sinks has dtype {sinks.dtype}; it must be floating-point")
    # Where a row has no pairs, its lse is -inf too, and the difference would be NaN.
    return jnp.maximum(sinks.astype(jnp.float32), jnp.finfo(jnp.float32).min)


def check_is_pattern(pattern: object) -> Pattern | Index:
    """Returns `pattern` if it is a pattern or an index, whatever the inputs."""
    if not isinstance(pattern, (Pattern, Index)):
        made = f"; did you mean {pattern.__name__}()?" if isinstance(pattern, type) else ""
        raise ValueError(
            f"pattern={pattern!r} is not a Pattern, such as SampledRows(tau=0.9), VerticalSlash() "
            f"or Dense(), or an index{made}"
        )
    if isinstance(pattern, Pattern) and pattern.arrays:
        if all(getattr(pattern, name) is None for name in pattern.arrays):
            raise ValueError(
                f"pattern={type(pattern).__name__}(...) has no arrays yet; pass one layer of "
                "pattern.bind(ModelSizes(num_layers, num_heads, seq_len))"
            )
    return pattern


def check_pattern(pattern: object, q: Array, causal: bool) -> None:
    """Checks that `pattern` supports these inputs."""
    pattern = check_is_pattern(pattern)
    heads = q.shape[-2]
    if isinstance(pattern, Index):
        if pattern.causal != causal:
            raise ValueError(
                f"pattern is an index with causal={pattern.causal}, but causal={causal}"
            )
        if pattern.known_seq_len() not in (None, q.shape[-3]):
            raise ValueError(
                f"pattern is an index of {pattern.known_seq_len()} tokens, but q has {q.shape[-3]}"
            )
        needed = math.prod(q.shape[:-3]), heads
        expected = f"[batch, heads] = {list(needed)} first, as in q"
    else:
        if not causal and not pattern.supports_bidirectional:
            raise ValueError(
                f"causal=False is not supported by {type(pattern).__name__}; use pattern=Dense() "
                "or AdaSpa()"
            )
        if not pattern.arrays:
            _check_hashable(pattern)
        needed, expected = (heads,), f"one entry for each of the {heads} query heads"
    for path, leaf in jax.tree_util.tree_leaves_with_path(pattern):
        if jnp.shape(leaf)[: len(needed)] != needed:
            raise ValueError(
                f"pattern{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}; expected "
                f"{expected}"
            )


def check_documents(
    documents: Documents | None, q: Array, block_size: int, causal: bool
) -> Documents | None:
    """Returns the documents of q's sequences: one row per sequence if packed."""
    if documents is None:
        return None
    if not isinstance(documents, Documents):
        raise ValueError(
            f"documents is a {type(documents).__name__}; build it with "
            "Documents.from_segment_ids, from_cu_seqlens, from_lengths or padded"
        )
    if not causal:
        crossed = "would cross documents" if documents.packed else "would include the padding"
        raise ValueError(f"documents need causal=True; non-causal pairs {crossed}")
    if documents.block_size != block_size:
        raise ValueError(
            f"documents have block_size={documents.block_size}, but the pattern has {block_size}; "
            "they must be equal"
        )
    batch, num_blocks = math.prod(q.shape[:-3]), q.shape[-3] // block_size
    # Under `jax.vmap` a single sequence may come with arrays without a batch axis.
    alone = q.ndim == 3 and jnp.ndim(documents.first) == 1
    documents = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32)[None if alone else ...], documents)
    assert documents is not None  # for the type checker
    for shape in (x.shape for x in jax.tree.leaves(documents)):
        if len(shape) != 2 or shape[0] not in (1, batch) or shape[1] != num_blocks:
            raise ValueError(
                f"documents have arrays of shape {list(shape)}; expected [{batch}, {num_blocks}], "
                f"for {batch} sequences of {q.shape[-3]} tokens, as in q"
            )
    if not documents.packed:
        return documents
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, num_blocks)), documents)


def _check_hashable(pattern: Pattern) -> None:
    """Checks that a pattern can be a static argument of `jax.jit`."""
    try:
        hash(pattern)
    except TypeError as error:
        raise ValueError(
            f"pattern={type(pattern).__name__}(...) cannot be hashed ({error}); make its class a "
            "frozen dataclass, @dataclasses.dataclass(frozen=True), with hashable fields, such as "
            "Python numbers instead of JAX arrays"
        ) from None


def check_division(q: Array, k: Array, block_size: int, placement: Placement, causal: bool) -> None:
    """Checks that blocks divide the tokens, and devices the blocks, the batch and the heads."""
    ranks = placement.ranks
    unit, reason = block_size * ranks, f"block_size={block_size}"
    if ranks > 1:
        reason += f" x {ranks} devices on sharding.sequence={placement.sequence}"
    for name, x in (("q", q), ("k", k)):
        if x.shape[-3] % unit:
            raise ValueError(
                f"{name} has {x.shape[-3]} tokens; expected a multiple of {unit} ({reason}), such "
                f"as {nearest_multiples(x.shape[-3], unit)}"
            )
    if not causal and ranks > 1:
        raise ValueError(
            f"causal=False needs an unsharded sequence, but sharding.sequence={placement.sequence} "
            f"has {ranks} devices; set sharding.sequence to ()"
        )
    if placement.mesh is None:
        return
    if q.ndim > 4:
        raise ValueError(f"q has shape {q.shape}; with a mesh, at most one batch axis is allowed")
    batch, kv_heads = (q.shape[0] if q.ndim == 4 else 1), k.shape[-2]
    for has, size, name, axes in (
        (f"q has batch {batch}", batch, "sharding.batch", placement.batch),
        (f"k has {kv_heads} heads", kv_heads, "sharding.heads", placement.heads),
    ):
        devices = placement.size(axes)
        if size % devices:
            raise ValueError(
                f"{has}; expected a multiple of the {devices} devices on {name}={axes}, such as "
                f"{nearest_multiples(size, devices)}. Or set {name} to ()"
            )
