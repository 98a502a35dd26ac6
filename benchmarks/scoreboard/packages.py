"""The packages: how each computes a case, and what it offers. Imports none of them."""

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.kernels.masks import BLOCK
from benchmarks.kernels.rows import OWN
from benchmarks.peers.problems import mask_of
from benchmarks.scoreboard.cases import Case

Attention = Callable[[Array, Array, Array, Array | None], Array]  # q, k, v [1, S, H, D], bits


@dataclasses.dataclass(frozen=True)
class Package:
    """One row of the scoreboard.

    Attributes:
        modules: that must be installed.
        distributions: with recorded versions.
        calls: what computes each mask; a mask without a call is not measured.
        several_gpus: what it shards over several GPUs.
        lists: whether heads can have lists of blocks of their own.
        source: the file that says so.
        attention: makes the function of a case for a backend of this library's kernels.
        needs: what to install, beyond its own wheels.
    """

    modules: tuple[str, ...]
    distributions: tuple[str, ...]
    calls: dict[str, str]
    several_gpus: str
    lists: str
    source: str
    attention: Callable[[Case, str | None], Attention] | None = None
    needs: str = ""

    def missing(self) -> str | None:
        """Why it cannot run here, in words; None if it may."""
        absent = [x for x in self.modules if importlib.util.find_spec(x) is None]
        if not absent:
            return None if self.attention else f"installed, but not called here; {self.needs}"
        names = " and ".join(f"`{x}`" for x in absent)
        return f"not installed: no module {names}" + (f"; {self.needs}" if self.needs else "")


def own(case: Case, backend: str | None) -> Attention:
    """The public call of this library."""
    library = importlib.import_module("mtraining_jax")
    index = importlib.import_module("pallas_kernels").BlockMaskIndex
    options: dict[str, Any] = {"backend": backend}
    if case.mask == "documents":
        lengths = [[case.size] * (case.seq_len // case.size)]
        options["documents"] = library.Documents.from_lengths(lengths, case.seq_len)
    dense = library.SlidingWindow(case.size) if case.mask == "window" else library.Dense()

    def attend(q: Array, k: Array, v: Array, bits: Array | None) -> Array:
        pattern = dense if bits is None else index(bits, case.seq_len // BLOCK, BLOCK)
        return library.sparse_attention(q, k, v, pattern, **options)

    return attend


def dot_product_attention(case: Case, call: Callable[..., Array]) -> Attention:
    """A function with the arguments of `jax.nn.dot_product_attention`."""
    options: dict[str, Any] = {"is_causal": True}
    if case.mask == "window":
        options["local_window_size"] = case.size - 1, 0

    def attend(q: Array, k: Array, v: Array, bits: Array | None) -> Array:
        if case.mask == "documents":
            parts = (x.reshape(-1, case.size, *x.shape[2:]) for x in (q, k, v))
            return call(*parts, **options).reshape(q.shape)
        if bits is None:
            return call(q, k, v, **options)
        mask = blocks_of(case, bits).repeat(BLOCK, -1).repeat(BLOCK, -2)
        return call(q, k, v, mask=mask, **options)

    return attend


def blocks_of(case: Case, bits: Array) -> Array:
    """Unpacks lists to bool [1, Hq, NB, NB]."""
    return mask_of(jnp, jax.lax.bitcast_convert_type(bits, jnp.int32), case.seq_len // BLOCK)


def jax_nn(case: Case, backend: str | None) -> Attention:
    """The attention of cuDNN, through JAX."""
    call = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    return dot_product_attention(case, call)


def tokamax(case: Case, backend: str | None) -> Attention:
    """Its Mosaic GPU kernels, without those that it falls back to."""
    call = importlib.import_module("tokamax").dot_product_attention
    return dot_product_attention(case, functools.partial(call, implementation="mosaic"))


def jla(case: Case, backend: str | None) -> Attention:
    """Its own softmax kernels (with "auto" it calls cuDNN unless there are documents)."""
    call = importlib.import_module("jla.layers.attention").attention
    options: dict[str, Any] = {"implementation": "mosaic_gpu"}
    if case.mask == "documents":
        options["segment_ids"] = jnp.arange(case.seq_len, dtype=jnp.int32)[None] // case.size
    if case.mask == "window":
        options["sliding_window"] = case.size
    return lambda q, k, v, bits: call(q, k, v, **options)


def fa4(case: Case, backend: str | None) -> Attention:
    """FlashAttention-4's kernels."""
    library = importlib.import_module("fa4_jax")
    importlib.import_module("fa4_jax.kernels")  # fails here rather than while tracing
    if case.mask == "documents":
        starts = jnp.arange(0, case.seq_len + 1, case.size, dtype=jnp.int32)
        packed = functools.partial(library.flash_attn_varlen, causal=True)
        return lambda q, k, v, bits: packed(q[0], k[0], v[0], starts, starts)[None]
    options: dict[str, Any] = {"causal": True}
    if case.mask == "window":
        options["window_size"] = case.size - 1, 0

    @dataclasses.dataclass(frozen=True)
    class Listed(library.MaskMod):
        blocks: Any

        def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> Any:
            return self.blocks[batch, head, query // BLOCK, key // BLOCK] != 0

    def attend(q: Array, k: Array, v: Array, bits: Array | None) -> Array:
        mask = None if bits is None else Listed(blocks_of(case, bits).astype(jnp.int32))
        return library.flash_attn(q, k, v, mask_mod=mask, **options)

    return attend


_AS_BATCH = "equal documents as a batch"
PACKAGES = {
    OWN: Package(
        ("mtraining_jax",), (), attention=own,
        calls={
            "dense": "`Dense()`", "documents": "`documents=`", "window": "`SlidingWindow`",
            "lists": "`BlockMaskIndex`",
        },
        several_gpus="the sequence: gathered in a node, ring between nodes",
        lists="yes", source="docs/attention.md",
    ),
    "jax.nn, cuDNN": Package(
        ("jax",), ("nvidia-cudnn-cu13",), attention=jax_nn,
        calls={
            "dense": "`is_causal`", "documents": _AS_BATCH, "window": "`local_window_size`",
            "lists": "`mask=`, of all pairs",
        },
        several_gpus="batch and heads; a sharded sequence is refused",
        lists="as a mask of S x S pairs", source="jax/_src/cudnn/fused_attention_stablehlo.py",
    ),
    "jax-linear-attention": Package(
        ("jla",), ("jax-linear-attention",), attention=jla,
        calls={
            "dense": '`"mosaic_gpu"`', "documents": "`segment_ids`", "window": "`sliding_window`",
        },
        several_gpus="the sequence: ring in plain JAX, or Ulysses with these kernels",
        lists="no: MoBA and NSA are plain JAX with a mask of S x S pairs",
        source="jla/distributed/context_parallel_attention.py, jla/ops/moba.py",
    ),
    "fa4-jax": Package(
        ("fa4_jax", "cutejax", "cutlass"), ("fa4-jax", "nvidia-cutlass-dsl"), attention=fa4,
        calls={
            "dense": "`causal`", "documents": "`flash_attn_varlen`", "window": "`window_size`",
            "lists": "`mask_mod`, computes all pairs",
        },
        several_gpus="no rule of its own",
        lists="as a function of the pair; its kernels skip no block for it",
        source="its README and fa4_jax/attention.py",
        needs="it needs cutejax and nvidia-cutlass-dsl",
    ),
    "tokamax": Package(
        ("tokamax",), ("tokamax",), attention=tokamax,
        calls={
            "dense": '`"mosaic"`', "documents": _AS_BATCH, "window": "`local_window_size`",
            "lists": "`mask=`, of all pairs",
        },
        several_gpus="the queries' sequence, with all keys on each GPU; ring on TPUs only",
        lists="as a mask of S x S pairs", source="tokamax/_src/ops/attention/base.py",
    ),
    "Transformer Engine": Package(
        ("transformer_engine", "transformer_engine_jax"), ("transformer-engine-jax",), calls={},
        several_gpus="the sequence: ring or all-gather, with cuDNN",
        lists="no", source="transformer_engine/jax/attention.py",
        needs="its JAX part is published as source only and is compiled with CUDA and cuDNN",
    ),
}  # fmt: skip
