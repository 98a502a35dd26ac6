"""Sparse or dense attention of this library in MaxText, on GPUs, as `attention=mtraining`.

    import runpy
    import sys

    from examples import maxtext_attention
    from mtraining_jax import SampledRows

    maxtext_attention.install(pattern=SampledRows())
    sys.argv[1:] = ["config.yml", "attention=mtraining", "hardware=gpu"]
    runpy.run_module("maxtext.trainers.pre_train.train", run_name="__main__", alter_sys=True)

Packed data needs `max_segments_per_seq`, as Transformer Engine does. Context parallelism over one
or two mesh axes works without packing, with and without `context_parallel_load_balance`.

Written for `AttentionOp.apply_attention` of MaxText 0.2.5.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

from jax import Array

from examples.trainer_attention import refuse, segment_attention
from mtraining_jax import SampledRows, Sharding, SlidingWindow, sparse_attention


def install(name: str = "mtraining", **options: Any) -> None:
    """Adds an attention kernel to MaxText.

    Args:
        name: value of MaxText's `attention=` that selects it.
        **options: arguments of `sparse_attention`: pattern, backend, and sharding with ring. The
            mesh, its axes and the order of tokens are MaxText's.
    """
    from maxtext.layers.attention_op import AttentionOp  # pyright: ignore[reportMissingImports]

    AttentionOp.apply_attention = extended(AttentionOp.apply_attention, name, **options)


def extended(theirs: Callable[..., Any], name: str, **options: Any) -> Callable[..., Any]:
    """Returns an `AttentionOp.apply_attention` that leaves other kernels to `theirs`."""
    sharding = options.pop("sharding", Sharding())

    def apply_attention(
        self: Any,
        query: Array,
        key: Array,
        value: Array,
        decoder_segment_ids: Array | None,
        segment_positions: Array | None,
        lengths: Array | None,
        model_mode: str,
        *positional: Any,
        sinks: Array | None = None,
        qk_product_einsum: Any = None,
        wv_product_einsum: Any = None,
        **others: Any,
    ) -> tuple[Any, Any, Any]:
        if self.attention_kernel != name:
            others |= dict(
                sinks=sinks,
                qk_product_einsum=qk_product_einsum,
                wv_product_einsum=wv_product_einsum,
            )
            of_segments = decoder_segment_ids, segment_positions, lengths
            return theirs(self, query, key, value, *of_segments, model_mode, *positional, **others)
        if model_mode != "train":
            raise ValueError(
                f"attention={name} is for training, not for model_mode={model_mode}; decode with "
                "attention=dot_product"
            )
        kind = getattr(self.attention_type, "value", self.attention_type)
        refuse(
            f"attention={name}",
            {
                "attention_type": kind if kind not in ("global", "local_sliding") else None,
                "attn_logits_soft_cap": self.attn_logits_soft_cap,
                "dropout_rate": self.dropout_rate,
                "use_ragged_attention": self.use_ragged_attention,
                **{f"argument {i + 7} of apply_attention": x for i, x in enumerate(positional)},
                **others,
            },
        )
        placed = dataclasses.replace(sharding, **_placement(self))
        call = dict(scale=1.0, sharding=placed) | options  # MaxText scales queries
        if sinks is not None:
            call["sinks"] = sinks
        if kind == "local_sliding":
            block_size = call.get("pattern", SampledRows()).block_size
            call["pattern"] = SlidingWindow(self.sliding_window_size, block_size)
        packed = self.config.packing and self.config.dataset_type != "synthetic"
        if decoder_segment_ids is None or not packed:  # padding comes last, so nothing sees it
            return cast(Array, sparse_attention(query, key, value, **call)), None, None
        if self.config.max_segments_per_seq < 1:
            raise ValueError(
                f"attention={name} with packing needs max_segments_per_seq, the documents that a "
                "sequence may have, such as max_segments_per_seq=32"
            )
        out = segment_attention(
            query, key, value, decoder_segment_ids, padding=0,
            max_documents=self.config.max_segments_per_seq, **call,
        )  # fmt: skip
        return out, None, None

    return apply_attention


def _placement(op: Any) -> dict[str, Any]:
    """Mesh, its axes and the order of tokens, from MaxText's mesh and rules."""
    entries = op._logical_to_mesh_axes(op.flash_axis_names_q)

    def mesh_axes(entry: Any) -> tuple[str, ...]:
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        return tuple(name for name in names if op.mesh.shape[name] > 1)

    batch, heads, tokens = (mesh_axes(entry) for entry in tuple(entries)[:3])
    # MaxText's load balance: rank r of R has chunks r and 2R - 1 - r of 2R, which is a zigzag.
    order = "zigzag" if tokens and op.config.context_parallel_load_balance else None
    return dict(mesh=op.mesh, sequence=tokens, batch=batch, heads=heads, order=order)
