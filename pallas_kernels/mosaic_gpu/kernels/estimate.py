"""Hopper kernels that score key blocks by probe queries; a tile is one key block and one head."""

# pyright: reportPrivateImportUsage=false
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.interface import Estimate, ProbeCall
from pallas_kernels.mosaic_gpu.common import (
    LOG2E,
    ROWS,
    TILE,
    await_last,
    iota,
    load_rows,
    product,
    rows_to_tile,
    tiled,
)
from pallas_kernels.mosaic_gpu.device import multiprocessors

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


@dataclasses.dataclass(frozen=True)
class HopperEstimate(Estimate):
    interpret: Any = False  # or parameters of Pallas' GPU interpreter

    def block_statistics(self, call: ProbeCall) -> tuple[Array, Array]:
        log2_scale = call.scale * LOG2E

        def tile(refs: dict[str, Any], at: tuple, logits: list[Array], _: tuple) -> None:
            (x,) = logits
            peak = x.max(axis=1)
            if call.valid_len is not None:  # avoids -inf - -inf below, for blocks after a query
                peak = jnp.maximum(peak, _LOWEST)
            terms = jnp.exp2((x - rows_to_tile(peak, x)) * log2_scale)
            refs["peak"].at[at][...] = peak
            refs["total"].at[at][...] = terms.sum(axis=1)

        return self._over_tiles(
            tile, call, rows={}, outputs=("peak", "total"), size=ROWS, scratch={}, width=TILE
        )

    def block_masses(
        self, call: ProbeCall, peak: Array, to_mass: Array
    ) -> tuple[Array, Array, Array]:
        log2_scale = call.scale * LOG2E

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

        return self._over_tiles(
            tile,
            call,
            rows={"peak": peak, "to_mass": to_mass},
            outputs=("columns", "own", "beyond"),
            size=TILE,
            scratch={"scratch": plgpu.SMEM((_most_heads(call.q), ROWS, _PITCH), jnp.float32)},
            width=_HALF,
        )

    def _over_tiles(
        self,
        tile: Callable,
        call: ProbeCall,
        *,
        rows: dict[str, Array],
        outputs: tuple[str, ...],
        size: int,
        scratch: dict[str, Any],
        width: int,
    ) -> Any:
        """Calls `tile(refs, (batch, head, block), causal logits [64, width], rows)` for each tile.

        `rows` are values per query; outputs have `size` numbers per tile; each compute warpgroup
        has its part of `scratch`.
        """
        q, k, block_ids, queries = call.q, call.k, call.block_ids, call.queries
        _, num_heads, _, head_dim = q.shape
        batch, kv_heads, num_local = k.shape[0], k.shape[2], block_ids.shape[0]
        group = num_heads // kv_heads
        heads = min(group, _most_heads(q))
        parts = -(-group // heads)
        columns = batch * kv_heads * parts
        share = min(max(multiprocessors(self.interpret) // columns, 1), num_local)
        end = call.num_blocks * TILE if call.valid_len is None else call.valid_len
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
                    plgpu.copy_gmem_to_smem(
                        refs["q"].at[own, head], smem["q"].at[i], bars["q_full"]
                    )

                def load(n: Array, _: None) -> None:
                    slot = lax.rem(n, _STAGES)
                    pl.when(n >= _STAGES)(lambda: plgpu.barrier_wait(bars["k_free"].at[slot]))
                    keys = pl.ds((first + n * share) * TILE, TILE)
                    plgpu.copy_gmem_to_smem(
                        refs["k"].at[b, keys, kv_head], smem["k"].at[slot], bars["k_full"].at[slot]
                    )

                lax.fori_loop(0, count, load, None)
                await_last([bars["k_free"]], count, _STAGES)

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
                        logits = product(smem["q"].at[warpgroup], keys.T, (ROWS, width))
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
        output = jax.ShapeDtypeStruct((batch, num_heads, num_local, size), jnp.float32)
        return tuple(
            plgpu.kernel(
                estimate_index,
                out_type=[output] * len(outputs),
                scratch_types=[smem, bars],
                grid=(columns, share),
                grid_names=("column", "share"),
                num_threads=heads + 1,
                thread_name="wg",
                compiler_params=_COMPILER_PARAMS,
                interpret=self.interpret,
            )(q, k, shifts, *rows.values(), *(() if queries is None else (queries,)))
        )


def _most_heads(q: Array) -> int:
    """Returns how many heads share a key block; wider ones do not fit in shared memory."""
    return 1 if q.shape[-1] > TILE else _MOST_HEADS
