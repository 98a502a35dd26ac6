"""Sparse or dense attention of this library in levanter and marin, on GPUs.

    import runpy

    from examples import levanter_attention
    from mtraining_jax import SampledRows

    levanter_attention.install(pattern=SampledRows())
    runpy.run_module("levanter.main.train_lm", run_name="__main__", alter_sys=True)

Every attention layer with the default `attn_backend` then uses this library, also in gpt2, olmo and
other models that call `dot_product_attention`. Layers that name a backend ("nvte", "splash", ...)
keep it.

Written for `dot_product_attention` and `AttentionMask` of levanter 1.2 (stanford-crfm/levanter
9263f81) and of marin (marin-community/marin 0009e74, lib/levanter), with haliax 1.4.dev453.
"""

import dataclasses
import inspect
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
from jax import Array

from examples.trainer_attention import refuse, segment_attention
from mtraining_jax import SampledRows, Sharding, SlidingWindow, sparse_attention

_NAME = "attention by mtraining_jax"
_ARRAYS = "QPos", "KPos", "Key", "query", "key", "value", "mask"
# Softmax and sums are always fp32, of inputs in their common dtype.
_WITHOUT_EFFECT = "attention_dtype", "precision", "flash_block_size", "prng"


def install(*, max_documents: int = 64, **options: Any) -> None:
    """Makes this library the default backend of levanter's attention.

    Args:
        max_documents: documents that a packed sequence may have; with more, its output is NaN.
        **options: arguments of `sparse_attention`: pattern, backend, and sharding with order and
            ring. The mesh and its axes are those of haliax.
    """
    from levanter.layers import attention  # pyright: ignore[reportMissingImports]

    theirs = attention.dot_product_attention
    ours = make_attention(theirs, max_documents=max_documents, **options)
    for name, module in list(sys.modules.items()):
        if name.startswith("levanter.") and vars(module).get("dot_product_attention") is theirs:
            vars(module)["dot_product_attention"] = ours


def make_attention(theirs: Callable[..., Any], max_documents: int = 64, **options: Any) -> Callable:
    """Returns a `dot_product_attention` that leaves calls with a named backend to `theirs`."""
    signature = inspect.signature(theirs)
    sharding = options.pop("sharding", Sharding())

    def dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        call = dict(given.arguments)
        backend = getattr(call.pop("attn_backend"), "value", "default")
        if call.pop("use_flash") is False or backend != "default":
            return theirs(*args, **kwargs)
        QPos, KPos, Key, query, key, value, mask = (call.pop(name) for name in _ARRAYS)
        if call.pop("inference"):
            call.pop("dropout")
        scale, sink = call.pop("scaling_factor"), call.pop("attn_sink", None)
        refuse(_NAME, {name: x for name, x in call.items() if name not in _WITHOUT_EFFECT})
        fields = dict(getattr(mask, "__dict__", {}))
        if not fields.pop("is_causal", False):
            raise ValueError(f"{_NAME} needs a causal AttentionMask; got mask={mask!r}")
        ids, window = fields.pop("segment_ids", None), fields.pop("sliding_window", None)
        fields.pop("segment_run_metadata", None)  # of the same segments
        refuse(_NAME, {f"AttentionMask.{name}": value for name, value in fields.items()})

        q_pos, k_pos, depth = (getattr(axis, "name", axis) for axis in (QPos, KPos, Key))
        sizes = {axis.name: axis.size for axis in (*query.axes, *key.axes)}
        batch, heads, groups = _roles(query, key, q_pos, depth)
        dtype = jnp.result_type(query.array, key.array, value.array)
        q = _array(query, sizes, batch, [q_pos], heads + groups, [depth]).astype(dtype)
        k = _array(key, sizes, batch, [k_pos], heads, [depth]).astype(dtype)
        v = _array(value, sizes, batch, [k_pos], heads, [depth]).astype(dtype)
        placed = dataclasses.replace(sharding, **_placement(query, batch, q_pos, heads, groups))
        call = dict(scale=scale, sharding=placed) | options
        if sink is not None:
            call["sinks"] = _array(sink, sizes, heads + groups)
        if window is not None:
            call["pattern"] = SlidingWindow(window, call.get("pattern", SampledRows()).block_size)
        if ids is None:
            out = cast(Array, sparse_attention(q, k, v, **call))
        else:  # those of queries; of keys they are the same
            ids = _array(ids[0] if isinstance(ids, tuple) else ids, sizes, batch, [q_pos])
            out = segment_attention(q, k, v, ids, padding=-1, max_documents=max_documents, **call)
        order = [*batch, q_pos, *heads, *groups, depth]
        out = out.reshape([sizes[name] for name in order])
        out = out.transpose([order.index(axis.name) for axis in query.axes])
        return type(query)(out.astype(query.array.dtype), query.axes)

    return dot_product_attention


def _roles(query: Any, key: Any, q_pos: str, depth: str) -> tuple[list[str], list[str], list[str]]:
    """Names of batch axes, of the axis of key/value heads, and of query heads in their groups."""
    names, of_keys = ([axis.name for axis in x.axes] for x in (query, key))
    shared = [name for name in names if name in of_keys and name != depth]
    heads = [name for name in shared if name != names[0]][-1:]
    batch = [name for name in shared if name not in heads]
    return batch, heads, [name for name in names if name not in (*shared, q_pos, depth)]


def _array(x: Any, sizes: dict[str, int], *groups: list[str]) -> Array:
    """Array with one axis for each group of axes of x, which is broadcast over those it lacks."""
    names, wanted = [axis.name for axis in x.axes], [name for group in groups for name in group]
    if unknown := set(names) - set(wanted):
        raise ValueError(f"{_NAME} does not know the axis {unknown.pop()!r} of {names}")
    array = x.array.transpose([names.index(name) for name in wanted if name in names])
    array = array.reshape([sizes[name] if name in names else 1 for name in wanted])
    array = jnp.broadcast_to(array, [sizes[name] for name in wanted])
    return array.reshape([math.prod(sizes[name] for name in group) for group in groups])


def _placement(
    query: Any, batch: list[str], q_pos: str, heads: list[str], groups: list[str]
) -> dict[str, Any]:
    """Mesh and mesh axes of `Sharding`, from haliax's mapping of the axes."""
    from haliax import partitioning  # pyright: ignore[reportMissingImports]

    if not partitioning.current_thread_local_mapping():
        return {}

    def mesh_axes(names: list[str]) -> tuple[str, ...]:
        found = [partitioning.physical_axis_name(name) for name in names]
        entries = [(x,) if isinstance(x, str) else tuple(x or ()) for x in found]
        return tuple(itertools.chain(*entries))

    refuse(_NAME, {f"sharding over {name}": bool(mesh_axes([name])) for name in groups})
    axes = dict(batch=batch, sequence=[q_pos], heads=heads)
    mesh = partitioning.sharding_for_axis(query.axes).mesh
    return dict(mesh=mesh, **{role: mesh_axes(names) for role, names in axes.items()})
