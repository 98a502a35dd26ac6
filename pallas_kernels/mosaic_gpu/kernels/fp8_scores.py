"""Hopper kernel that scores key blocks for rows of queries with keys in 8 bits."""

# pyright: reportPrivateImportUsage=false
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp8_scores import CODE, WEIGHT_BLOCKS, Fp8Call, Fp8Scores, KeepRule
from pallas_kernels.masses import ScoreTiles
from pallas_kernels.mosaic_gpu.common import (
    EDGE,
    LOG2E,
    ROW_LAYOUT,
    ROWS,
    TILE,
    await_last,
    fold,
    full,
    launch,
    product,
    rows_to_tile,
    tiled,
)
from pallas_kernels.mosaic_gpu.device import multiprocessors
from pallas_kernels.mosaic_gpu.kernels.kept_blocks import MOST_BLOCKS, kept_blocks_kernel
from pallas_kernels.mosaic_gpu.kernels.row_tiles import RowTiles, row_inputs

_WARPGROUPS = 4
_TILE_ROWS = _WARPGROUPS * ROWS
_STAGES = 3  # tiles of keys in flight
_GROUP = 64  # blocks with means that are multiplied at once: the M dimension of a wgmma
_COMPUTE_REGISTERS, _MEMORY_REGISTERS = 104, 40
_SAMPLED = 4  # of a class of 16 keys
_LOWEST = -1e30  # less than any logarithm of a weight, and finite
_MOST = 1e32  # of the sum of a tile, so that those of all tiles are finite


@dataclasses.dataclass(frozen=True)
class HopperFp8Scores(Fp8Scores):
    interpret: Any = False  # or parameters of Pallas' GPU interpreter

    def tiles(self) -> ScoreTiles:
        return ScoreTiles(_TILE_ROWS, TILE, multiprocessors(self.interpret))

    def keeps(self, num_rows: int, num_blocks: int) -> bool:
        return num_rows % EDGE == 0 and num_blocks <= MOST_BLOCKS

    def kept(self, weights: Array, totals: Array, rule: KeepRule) -> Array:
        return kept_blocks_kernel(weights, totals, rule, self.interpret)

    def weights(self, call: Fp8Call) -> tuple[Array, Array]:
        batch, num_rows, heads, dim = call.q.shape
        keys, num_blocks = call.keys, call.keys.means.shape[1]
        interpreted = bool(self.interpret)
        dtype = jnp.float16 if interpreted else CODE  # no products of 8-bit numbers there
        codes, key_codes = call.codes.astype(dtype), keys.codes.astype(dtype)
        padded = -(-num_blocks // WEIGHT_BLOCKS) * WEIGHT_BLOCKS
        means = jnp.pad(keys.means, ((0, 0), (0, padded - num_blocks), (0, 0), (0, 0)))
        inputs = {
            "q": call.q, "codes": codes, "keys": key_codes, "means": means,
            "units": call.units * (call.scale * LOG2E), "key_units": keys.units.swapaxes(1, 2),
        } | row_inputs(call.places, call.starts, _TILE_ROWS, TILE)  # fmt: skip
        items = batch * heads * (num_rows // _TILE_ROWS)
        programs = min(multiprocessors(self.interpret), items)

        def kernel(refs: dict[str, Any]) -> None:
            shape = batch, heads, num_rows // _TILE_ROWS
            walk = RowTiles(refs, shape, TILE, programs, alternate=True)
            coded = _Fp8Rows(refs, walk, heads // keys.codes.shape[2], call.scale * LOG2E)
            warpgroup = lax.axis_index("wg")
            pl.when(warpgroup == _WARPGROUPS)(coded.load)
            pl.when(warpgroup < _WARPGROUPS)(lambda: coded.score(warpgroup))

        kernel.__name__ = "fp8_scores"
        outputs = {
            "weights": jax.ShapeDtypeStruct((batch, heads, padded, num_rows), jnp.float16),
            "totals": jax.ShapeDtypeStruct((batch, heads, num_rows), jnp.float32),
        }
        memory = {
            "q": tiled((_TILE_ROWS, dim), call.q.dtype),
            "codes": tiled((_TILE_ROWS, dim), dtype),
            "keys": tiled((_STAGES, TILE, dim), dtype),
            "means": tiled((_GROUP, dim), call.q.dtype),
            "offsets": plgpu.SMEM((_WARPGROUPS, _GROUP, ROWS), jnp.float32),
        }
        barriers = {
            "rows_full": plgpu.Barrier(num_arrivals=2),
            "rows_free": plgpu.Barrier(num_arrivals=_WARPGROUPS),
        }
        for name, slots in (("keys", _STAGES), ("means", 1)):
            barriers[f"{name}_full"] = plgpu.Barrier(num_barriers=slots)
            barriers[f"{name}_free"] = plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=slots)
        resources = memory, barriers, programs, self.interpret
        results = launch(kernel, inputs, outputs, *resources, warpgroups=_WARPGROUPS)
        return results["weights"], results["totals"]


class _Fp8Rows:
    """Tiles of keys pass each row tile from the last to the first, one per block."""

    def __init__(self, refs: dict[str, Any], walk: RowTiles, group: int, log2_scale: float):
        self.refs, self.smem, self.bars = refs, refs["smem"], refs["bars"]
        self.walk, self.group, self.log2_scale = walk, group, log2_scale

    def load(self) -> None:
        """Runs the memory warpgroup."""
        plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
        refs, smem, bars = self.refs, self.smem, self.bars

        def copy(source: Any, name: str, slot: Array) -> None:
            plgpu.copy_gmem_to_smem(source, smem[name].at[slot], bars[f"{name}_full"].at[slot])

        def await_free(name: str, step: Array, slots: int) -> Array:
            slot = lax.rem(step, slots)
            free = bars[f"{name}_free"].at[slot]
            pl.when(step >= slots)(lambda: plgpu.barrier_wait(free))
            return slot

        def load_item(n: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
            it = self.walk.item(n)
            rows = pl.ds(it.row_tile * _TILE_ROWS, _TILE_ROWS)
            pl.when(n > 0)(lambda: plgpu.barrier_wait(bars["rows_free"]))
            for name in ("q", "codes"):
                source = refs[name].at[it.batch, rows, it.head]
                plgpu.copy_gmem_to_smem(source, smem[name], bars["rows_full"])
            (first, end), kv_head = self.walk.columns(it), lax.div(it.head, self.group)
            steps, groups = done

            def load_tile(i: Array, _: None) -> None:
                tile = end - 1 - i

                def load_means() -> None:
                    await_free("means", groups + self._group(i, end), 1)
                    blocks = pl.ds(lax.div(tile, _GROUP) * _GROUP, _GROUP)
                    source, full = refs["means"].at[it.batch, blocks, kv_head], bars["means_full"]
                    plgpu.copy_gmem_to_smem(source, smem["means"], full.at[0])

                pl.when(self._enters_group(i, end))(load_means)
                slot = await_free("keys", steps + i, _STAGES)
                tokens = pl.ds(tile * TILE, TILE)
                copy(refs["keys"].at[it.batch, tokens, kv_head], "keys", slot)

            lax.fori_loop(0, end - first, load_tile, None)
            return self._after(done, first, end)

        steps, groups = lax.fori_loop(0, self.walk.count(), load_item, (jnp.int32(0),) * 2)
        await_last([bars["keys_free"]], steps, _STAGES)
        await_last([bars["means_free"]], groups, 1)
        plgpu.barrier_wait(bars["rows_free"])

    def score(self, warpgroup: Array) -> None:
        """Runs a compute warpgroup, for its 64 rows of each row tile."""
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        refs, smem, bars = self.refs, self.smem, self.bars

        def score_item(n: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
            it = self.walk.item(n)
            rows = pl.ds(it.row_tile * _TILE_ROWS + warpgroup * ROWS, ROWS)
            warpgroup_rows, offsets = pl.ds(warpgroup * ROWS, ROWS), smem["offsets"].at[warpgroup]
            # Loads in the loop over tiles would be waited for in each of its steps.
            seen, uncut = self.walk.seen(it, rows), self.walk.uncut(it)
            row_units = plgpu.load(
                refs["units"].at[it.batch, it.head, rows], layout=ROW_LAYOUT, optimized=False
            )
            (first, end), kv_head = self.walk.columns(it), lax.div(it.head, self.group)
            steps, groups = done
            plgpu.barrier_wait(bars["rows_full"])
            codes = smem["codes"].at[warpgroup_rows]
            if codes.dtype == CODE:  # not interpreted; products are faster from registers
                layout = plgpu.Layout.WGMMA_8BIT
                codes = plgpu.load(codes, layout=layout, optimized=False)

            def unit_of(tile: Array) -> Array:
                return refs["key_units"][it.batch, kv_head, tile]

            def multiply(name: str, slot: Any, a: Any, b: Any, shape: tuple, dtype: Any) -> Array:
                plgpu.barrier_wait(bars[f"{name}_full"].at[slot])
                products = product(a, b.T, shape, dtype)
                plgpu.barrier_arrive(bars[f"{name}_free"].at[slot])
                return products

            def multiply_means() -> None:
                """Writes the products of rows and means, transposed so that tiles are rows."""
                means, rows = smem["means"], smem["q"].at[warpgroup_rows]
                mean_products = multiply("means", 0, means, rows, (_GROUP, ROWS), jnp.float32)
                plgpu.commit_smem()  # other warps may still read those of the last group
                offsets[...] = mean_products * self.log2_scale
                plgpu.commit_smem()

            def score_tile(i: Array, state: tuple) -> tuple:
                reference, base, total, key_unit = state
                tile = end - 1 - i
                unit = row_units * key_unit
                key_unit = unit_of(jnp.maximum(tile - 1, 0))  # in time for the next tile

                pl.when(self._enters_group(i, end))(multiply_means)
                tile_offsets = offsets.at[lax.rem(tile, _GROUP)]
                offset = plgpu.load(tile_offsets, layout=ROW_LAYOUT, optimized=False)
                # A base that is known before the products: exponentials wait for no maximum.
                before, base = base, jnp.maximum(base, offset)
                shift, decay = offset - base, jnp.exp2(before - base)
                slot = lax.rem(steps + i, _STAGES)
                tile_keys, shape = smem["keys"].at[slot], (ROWS, TILE)
                products = multiply("keys", slot, codes, tile_keys, shape, jnp.float16)

                def whole(products: Array) -> tuple[Array, ...]:
                    tile_total = _estimate(products, unit, shift)
                    return reference, base, total * decay + tile_total, base + jnp.log2(tile_total)

                def cut(products: Array) -> tuple[Array, ...]:
                    at = tile * TILE
                    masked = self.walk.mask(at, products.astype(jnp.float32), seen)
                    inside = self.walk.sees_all(at, TILE, seen)
                    exact = _bounded(_terms(masked, unit, shift))
                    tile_total = jnp.where(inside, _estimate(products, unit, shift), exact)
                    weight = base + jnp.log2(tile_total)
                    first = jnp.where(reference > _LOWEST, reference, jnp.maximum(weight, _LOWEST))
                    # Blocks that a row does not see leave no trace in its results.
                    sees = tile_total > 0.0
                    sums = jnp.where(sees, total * decay + tile_total, total)
                    return first, jnp.where(sees, base, before), sums, weight

                reference, base, total, weight = lax.cond(
                    self.walk.is_cut(uncut, tile), cut, whole, products
                )
                block_weights = refs["weights"].at[it.batch, it.head, tile, rows]
                block_weights[...] = (weight - reference).astype(jnp.float16)
                return reference, base, total, key_unit

            lowest, zero = (full((ROWS,), x, ROW_LAYOUT) for x in (_LOWEST, 0.0))
            start = lowest, lowest, zero, unit_of(jnp.maximum(end - 1, 0))
            reference, base, total, _ = lax.fori_loop(0, end - first, score_tile, start)
            plgpu.barrier_arrive(bars["rows_free"])
            total_weight = base - reference + jnp.log2(total)
            refs["totals"].at[it.batch, it.head, rows][...] = total_weight
            return self._after(done, first, end)

        lax.fori_loop(0, self.walk.count(), score_item, (jnp.int32(0),) * 2)

    @staticmethod
    def _enters_group(i: Array, end: Array) -> Array:
        """Whether a group of means is needed from the i-th tile on."""
        return (i == 0) | (lax.rem(end - 1 - i, _GROUP) == _GROUP - 1)

    @staticmethod
    def _group(i: Array, end: Array) -> Array:
        return lax.div(end - 1, _GROUP) - lax.div(end - 1 - i, _GROUP)

    def _after(self, done: tuple[Array, Array], first: Array, end: Array) -> tuple[Array, Array]:
        """Returns the tiles and groups of an item, added to those before it."""
        groups = jnp.where(end > first, self._group(end - first - 1, end) + 1, 0)
        return done[0] + end - first, done[1] + groups


def _estimate(products: Array, unit: Array, shift: Array) -> Array:
    """Estimates the sum of 2^(product * unit + shift) over each row: fp32 [64]."""
    parts = [products[:, n : n + EDGE] for n in range(0, TILE, EDGE)]
    few = parts[:: len(parts) // _SAMPLED]
    rest = [part for n, part in enumerate(parts) if n % (len(parts) // _SAMPLED)]
    top_of_few = _reduce(jnp.maximum, few)
    top = jnp.maximum(top_of_few, _reduce(jnp.maximum, rest)).astype(jnp.float32)
    largest = _terms(top, unit, shift)
    total = _reduce(jnp.add, [_terms(x, unit, shift) for x in few])
    # The largest term counts once; the others are as large as the sampled ones on average.
    others = len(parts) - 1
    more = jnp.where(
        top_of_few.astype(jnp.float32) >= top,
        (total - largest) * (others / (_SAMPLED - 1)),
        total * (others / _SAMPLED),
    )
    return _bounded(largest + more)


def _terms(x: Array, unit: Array, shift: Array) -> Array:
    x = x.astype(jnp.float32)
    return jnp.exp2(x * rows_to_tile(unit, x) + rows_to_tile(shift, x))


def _bounded(terms: Array) -> Array:
    """Sums each row of terms; not a number and more than `_MOST` count as that."""
    total = fold(jnp.add, terms).sum(axis=1)
    return jnp.where(total < _MOST, total, _MOST)


def _reduce(combine: Callable[[Array, Array], Array], parts: list[Array]) -> Array:
    """Combines arrays pairwise."""
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [combine(a, b) for a, b in pairs] + parts[len(parts) - len(parts) % 2 :]
    return parts[0]
