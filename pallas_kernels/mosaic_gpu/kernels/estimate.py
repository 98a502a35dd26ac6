"""Hopper kernels that score key blocks by the attention of the last queries of a sequence.

A tile [64, 128] is one key block and one query head. Its results depend only on that head's queries
and that block's keys, so they are bit-identical for any distribution of blocks over ranks.
"""

# pyright: reportPrivateImportUsage=false
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.checks import Shaped
from pallas_kernels.mosaic_gpu import device
from pallas_kernels.mosaic_gpu.common import LOG2E, ROWS, TILE, iota, load_rows, rows_to_tile, tiled

NUM_QUERIES = ROWS

_STAGES = 2  # key blocks in flight
_MOST_HEADS = 2  # query heads that share a key block, one compute warpgroup each
_HALF = TILE // 2
_PITCH = TILE + ROWS + 8  # so that the rows of a store use different banks
# Explicit layouts: inferring them fails for the pitch of the scratch memory.
_COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True,
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=0,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)
_LOWEST = float(jnp.finfo(jnp.float32).min)
_LINE = plgpu.Layout.WG_STRIDED((TILE,), 1)


def block_statistics(
    q: Array,
    k: Array,
    block_ids: Array,
    num_blocks: int,
    *,
    scale: float,
    valid_len: Array | None = None,
    queries: Array | None = None,
    multiprocessors: int | None = None,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Computes peak and normalizer of every (key block, query), for a softmax over all blocks.

    Args:
        q: [B, Hq, 64, D] bf16 or fp16, D 64 or 128: the last queries of the sequence; with
            `queries`, any number of query sets.
        k: [B, n, Hk, D], local keys; n a multiple of 128, Hq a multiple of Hk.
        block_ids: int32 [n/128], global number of each local block of 128 keys.
        num_blocks: NB, blocks of the whole sequence.
        scale: scale of the logits.
        valid_len: int32 scalar or [B], one past the last query's position; None is NB * 128.
        queries: int32 [B], the query set that scores the keys of a batch entry; None for its own.
        multiprocessors: number of multiprocessors to use; None for those of the device.
        interpret: False, or parameters of the Pallas GPU interpreter.

    Returns:
        (peak, total) fp32 [B, Hq, n/128, 64]: the largest causal logit (unscaled), and the sum
        of exp((logit - peak) * scale); the lowest finite number and 0 for a query without keys.
    """
    log2_scale = scale * LOG2E

    def tile(refs: dict[str, Any], at: tuple, logits: list[Array], _: tuple) -> None:
        (x,) = logits
        peak = x.max(axis=1)
        if valid_len is not None:  # avoids -inf - -inf below, for blocks after a query
            peak = jnp.maximum(peak, _LOWEST)
        terms = jnp.exp2((x - rows_to_tile(peak, x)) * log2_scale)
        refs["peak"].at[at][...] = peak
        refs["total"].at[at][...] = terms.sum(axis=1)

    sizes = k.shape[0], q.shape[1], block_ids.shape[0], ROWS
    shape = jax.ShapeDtypeStruct(sizes, jnp.float32)
    return _over_tiles(
        tile,
        q,
        k,
        block_ids,
        num_blocks,
        rows={},
        outputs={"peak": shape, "total": shape},
        scratch={},
        width=TILE,
        valid_len=valid_len,
        queries=queries,
        multiprocessors=multiprocessors,
        interpret=interpret,
    )


def block_masses(
    q: Array,
    k: Array,
    block_ids: Array,
    num_blocks: int,
    peak: Array,
    to_mass: Array,
    *,
    scale: float,
    valid_len: Array | None = None,
    queries: Array | None = None,
    multiprocessors: int | None = None,
    interpret: Any = False,
) -> tuple[Array, Array, Array]:
    """Sums weights exp((logit - peak) * scale) * to_mass over each tile's columns and diagonals.

    Other arguments are as in `block_statistics`.

    Args:
        peak: fp32 [B, Hq, 64], largest logit of each query over the whole sequence; with `queries`,
            one row per query set.
        to_mass: fp32, same shape as `peak`.

    Returns:
        (columns, own, beyond), fp32 [B, Hq, n/128, 128] each. Entry t of `own` is the diagonal
        on which the last query sees key t of this block, entry t of `beyond` the one on which it
        sees key t of the next block (zero from 63 on, where it has none of this block's keys).
    """
    log2_scale = scale * LOG2E

    def tile(refs: dict[str, Any], at: tuple, logits: list[Array], rows: tuple) -> None:
        peak, to_mass = rows
        scratch = refs["scratch"]
        # Key j is in column 64 + j of the scratch, and for row u on diagonal j + 63 - u. The
        # first columns repeat the last keys, so that the 128 columns from u + 1 on hold each
        # key of row u once; entry t of these belongs to diagonal t or t + 128.
        for x, places in zip(logits, ((ROWS,), (0, ROWS + _HALF)), strict=True):
            weights = jnp.exp2((x - rows_to_tile(peak, x)) * log2_scale)
            weights = weights * rows_to_tile(to_mass, x)
            for place in places:
                scratch[:, pl.ds(place, _HALF)] = weights
        plgpu.commit_smem()  # the whole warpgroup has written
        slot = plgpu.layout_cast(lax.iota(jnp.int32, TILE), _LINE)
        column = own = beyond = plgpu.layout_cast(jnp.zeros(TILE, jnp.float32), _LINE)
        for u in range(ROWS):
            column += plgpu.load(scratch.at[u, pl.ds(ROWS, TILE)], layout=_LINE)
            skewed = plgpu.load(scratch.at[u, pl.ds(u + 1, TILE)], layout=_LINE)
            is_own = slot >= ROWS - 1 - u
            own += jnp.where(is_own, skewed, 0.0)
            beyond += jnp.where(is_own, 0.0, skewed)
        plgpu.commit_smem()  # the whole warpgroup has read
        for name, x in (("columns", column), ("own", own), ("beyond", beyond)):
            refs[name].at[at][...] = x

    sizes = k.shape[0], q.shape[1], block_ids.shape[0], TILE
    shape = jax.ShapeDtypeStruct(sizes, jnp.float32)
    return _over_tiles(
        tile,
        q,
        k,
        block_ids,
        num_blocks,
        rows={"peak": peak, "to_mass": to_mass},
        outputs={"columns": shape, "own": shape, "beyond": shape},
        scratch={"scratch": plgpu.SMEM((_MOST_HEADS, ROWS, _PITCH), jnp.float32)},
        width=_HALF,
        valid_len=valid_len,
        queries=queries,
        multiprocessors=multiprocessors,
        interpret=interpret,
    )


def _over_tiles(
    tile: Callable,
    q: Array,
    k: Array,
    block_ids: Array,
    num_blocks: int,
    *,
    rows: dict[str, Array],
    outputs: dict[str, Any],
    scratch: dict[str, Any],
    width: int,
    valid_len: Array | None,
    queries: Array | None,
    multiprocessors: int | None,
    interpret: Any,
) -> Any:
    """Calls `tile(refs, (batch, head, block), logits, rows)` for every tile; returns the outputs.

    The logits are causal pieces [64, width], fp32; `rows` are values per query of a head; each
    compute warpgroup has its own part of `scratch`, whose first dimension is dropped.
    """
    _, num_heads, _, head_dim = q.shape
    batch, kv_heads, num_local = k.shape[0], k.shape[2], block_ids.shape[0]
    group = num_heads // kv_heads
    heads = min(group, _MOST_HEADS)
    parts = -(-group // heads)
    columns = batch * kv_heads * parts
    multiprocessors = multiprocessors or device.multiprocessors()
    share = min(max(multiprocessors // columns, 1), num_local)
    end = num_blocks * TILE if valid_len is None else valid_len
    # For each block: distance from its first key to the first of the last queries.
    own_ends = jnp.ndim(end) > 0
    end = jnp.asarray(end)[:, None] if own_ends else end
    shifts = (end - ROWS - block_ids * TILE).astype(jnp.int32)
    names = ["q", "k", "shifts", *rows, *(["queries"] if queries is not None else [])]
    names += [*outputs, "smem", "bars"]

    def estimate_index(*arguments: Any) -> None:
        refs = dict(zip(names, arguments, strict=True))
        smem, bars = refs["smem"], refs["bars"]
        warpgroup, column, first = (lax.axis_index(name) for name in ("wg", "column", "share"))
        b = lax.div(column, kv_heads * parts)
        own = b if queries is None else refs["queries"][b]
        kv_head = lax.rem(lax.div(column, parts), kv_heads)
        first_member = lax.rem(column, parts) * heads
        count = lax.div(num_local - first + share - 1, share)

        def memory_warpgroup() -> None:
            for i in range(heads):
                # In a group of odd size the last warpgroup may have no head.
                head = kv_head * group + lax.min(first_member + i, group - 1)
                plgpu.copy_gmem_to_smem(refs["q"].at[own, head], smem["q"].at[i], bars["q_full"])

            def load(n: Array, _: None) -> None:
                slot = lax.rem(n, _STAGES)
                pl.when(n >= _STAGES)(lambda: plgpu.barrier_wait(bars["k_free"].at[slot]))
                keys = pl.ds((first + n * share) * TILE, TILE)
                plgpu.copy_gmem_to_smem(
                    refs["k"].at[b, keys, kv_head], smem["k"].at[slot], bars["k_full"].at[slot]
                )

            def drain(n: Array, _: None) -> None:
                plgpu.barrier_wait(bars["k_free"].at[lax.rem(n, _STAGES)])

            lax.fori_loop(0, count, load, None)
            lax.fori_loop(lax.max(0, count - _STAGES), count, drain, None)

        def compute_warpgroup() -> None:
            member = first_member + warpgroup
            head = kv_head * group + lax.min(member, group - 1)
            own_rows = tuple(load_rows(refs[name].at[own, head]) for name in rows)
            own_refs = refs | {name: smem[name].at[warpgroup] for name in scratch}
            plgpu.barrier_wait(bars["q_full"])

            def step(n: Array, _: None) -> None:
                slot = lax.rem(n, _STAGES)
                block = first + n * share
                shift = refs["shifts"][b, block] if own_ends else refs["shifts"][block]
                plgpu.barrier_wait(bars["k_full"].at[slot])
                pieces = []
                for start in range(0, TILE, width):
                    keys = smem["k"].at[slot, pl.ds(start, width)]
                    logits = _product(smem["q"].at[warpgroup], keys.T, width)
                    causal = iota(logits, 0) + (shift - start) >= iota(logits, 1)
                    pieces.append(jnp.where(causal, logits, -jnp.inf))
                plgpu.barrier_arrive(bars["k_free"].at[slot])
                at = (b, head, block)
                pl.when(member < group)(lambda: tile(own_refs, at, pieces, own_rows))

            lax.fori_loop(0, count, step, None)

        pl.when(warpgroup == heads)(memory_warpgroup)
        pl.when(warpgroup < heads)(compute_warpgroup)

    smem = {
        "q": tiled((heads, ROWS, head_dim), q.dtype),
        "k": tiled((_STAGES, TILE, head_dim), k.dtype),
        **scratch,
    }
    bars = {
        "q_full": plgpu.Barrier(num_arrivals=heads),
        "k_full": plgpu.Barrier(num_barriers=_STAGES),
        "k_free": plgpu.Barrier(num_arrivals=heads, num_barriers=_STAGES),
    }
    return tuple(
        plgpu.kernel(
            estimate_index,
            out_type=list(outputs.values()),
            scratch_types=[smem, bars],
            grid=(columns, share),
            grid_names=("column", "share"),
            num_threads=heads + 1,
            thread_name="wg",
            compiler_params=_COMPILER_PARAMS,
            interpret=interpret,
        )(q, k, shifts, *rows.values(), *(() if queries is None else (queries,)))
    )


def _product(a: Any, b: Any, width: int) -> Array:
    def product(ref: Any) -> Array:
        plgpu.wgmma(ref, a, b)
        return ref[...]

    return pl.run_scoped(product, plgpu.ACC((ROWS, width), jnp.float32))


class HopperEstimate:
    """The Hopper implementation of `pallas_kernels.backends.Estimate`."""

    block_statistics = staticmethod(block_statistics)
    block_masses = staticmethod(block_masses)

    def unsupported(self, q: Shaped) -> str | None:
        if q.shape[2] == NUM_QUERIES:
            return None
        return f"{q.shape[2]} last queries (must be {NUM_QUERIES})"
