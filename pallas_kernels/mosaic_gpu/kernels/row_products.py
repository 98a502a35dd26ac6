"""Products of rows of queries and key columns, streamed through shared memory, for any length."""

# pyright: reportPrivateImportUsage=false
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.masses import DEPTH
from pallas_kernels.mosaic_gpu.common import ROWS, await_last, tiled
from pallas_kernels.mosaic_gpu.kernels.row_tiles import Item, RowTiles


class LongRows:
    """Rows and columns pass through shared memory in parts of `DEPTH` components."""

    name = "block_scores"  # of the kernel
    warpgroups = 2  # compute warpgroups
    tile_rows = warpgroups * ROWS
    width = 256  # columns per tile
    stages = 4  # parts of rows and columns in flight
    compute_registers = 232
    memory_registers = 40

    def __init__(self, refs: dict[str, Any], walk: RowTiles, group: int):
        self.refs, self.smem, self.bars = refs, refs["smem"], refs["bars"]
        self.walk, self.group = walk, group
        self.parts = refs["q"].shape[3] // DEPTH

    @classmethod
    def memory(cls, length: int, dtype: Any) -> dict[str, Any]:
        rows, columns = (cls.stages, cls.tile_rows, DEPTH), (cls.stages, cls.width, DEPTH)
        return {"q": tiled(rows, dtype), "k": tiled(columns, dtype)}

    @classmethod
    def barriers(cls) -> dict[str, Any]:
        return {
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=cls.stages),
            "free": plgpu.Barrier(num_arrivals=cls.warpgroups, num_barriers=cls.stages),
        }

    def step(self, done: Array, tile: Array, first: Array) -> Array:
        return done + (tile - first) * self.parts

    def load_item(self, n: Array, it: Item, done: Array) -> Array:
        refs, stages, width = self.refs, self.stages, self.width
        rows = pl.ds(it.row_tile * self.tile_rows, self.tile_rows)
        first, tiles = self.walk.columns(it)
        steps = (tiles - first) * self.parts

        def load(i: Array, _: None) -> None:
            slot = lax.rem(done + i, stages)
            pl.when(done + i >= stages)(lambda: plgpu.barrier_wait(self.bars["free"].at[slot]))
            columns = pl.ds((first + lax.div(i, self.parts)) * width, width)
            depth = pl.ds(lax.rem(i, self.parts) * DEPTH, DEPTH)
            kv_head = lax.div(it.head, self.group)
            for name, source in (
                ("q", refs["q"].at[it.batch, it.head, rows, depth]),
                ("k", refs["k"].at[it.batch, kv_head, columns, depth]),
            ):
                full = self.bars["full"].at[slot]
                plgpu.copy_gmem_to_smem(source, self.smem[name].at[slot], full)

        lax.fori_loop(0, steps, load, None)
        return done + steps

    def drain(self, steps: Array) -> None:
        await_last([self.bars["free"]], steps, self.stages)

    def begin_item(self) -> None:
        """Waits for what all products of an item need."""

    def end_item(self) -> None:
        """Releases what `begin_item` waited for."""

    def product(self, warpgroup: Array, first: Array) -> Array:
        def run(acc: Any) -> Array:
            def part(i: Array, _: None) -> None:
                slot = lax.rem(first + i, self.stages)
                plgpu.barrier_wait(self.bars["full"].at[slot])
                own = self.smem["q"].at[slot, pl.ds(warpgroup * ROWS, ROWS)]
                plgpu.wgmma(acc, own, self.smem["k"].at[slot].T)
                plgpu.wgmma_wait(1)
                # Only this part is in flight: the memory of the previous one is free.
                before = lax.rem(first + i + self.stages - 1, self.stages)
                pl.when(i > 0)(lambda: plgpu.barrier_arrive(self.bars["free"].at[before]))

            lax.fori_loop(0, self.parts, part, None)
            return acc[...]

        logits = pl.run_scoped(run, plgpu.ACC((ROWS, self.width), jnp.float32))
        last = lax.rem(first + self.parts - 1, self.stages)
        plgpu.barrier_arrive(self.bars["free"].at[last])
        return logits


class ShortRows(LongRows):
    """Rows no longer than a head dimension stay in shared memory; columns pass through it.

    With four compute warpgroups some compute exponentials while others multiply.
    """

    name = "short_block_scores"
    most_length = 128  # components of a row
    warpgroups = 4
    tile_rows = warpgroups * ROWS
    width = 128
    # More in total than the initial allocation (640 threads of 96), and no warpgroup gets any.
    compute_registers = 104

    @classmethod
    def memory(cls, length: int, dtype: Any) -> dict[str, Any]:
        columns = (cls.stages, cls.width, length)
        return {"q": tiled((cls.tile_rows, length), dtype), "k": tiled(columns, dtype)}

    @classmethod
    def barriers(cls) -> dict[str, Any]:
        return {
            "rows_full": plgpu.Barrier(),
            "rows_free": plgpu.Barrier(num_arrivals=cls.warpgroups),
            "full": plgpu.Barrier(num_barriers=cls.stages),
            "free": plgpu.Barrier(num_arrivals=cls.warpgroups, num_barriers=cls.stages),
        }

    def step(self, done: Array, tile: Array, first: Array) -> Array:
        return done + tile - first

    def load_item(self, n: Array, it: Item, done: Array) -> Array:
        refs, bars, stages, width = self.refs, self.bars, self.stages, self.width
        rows = pl.ds(it.row_tile * self.tile_rows, self.tile_rows)
        pl.when(n > 0)(lambda: plgpu.barrier_wait(bars["rows_free"]))
        source = refs["q"].at[it.batch, it.head, rows]
        plgpu.copy_gmem_to_smem(source, self.smem["q"], bars["rows_full"])
        (first, tiles), kv_head = self.walk.columns(it), lax.div(it.head, self.group)

        def load(j: Array, _: None) -> None:
            step = self.step(done, j, first)
            slot = lax.rem(step, stages)
            pl.when(step >= stages)(lambda: plgpu.barrier_wait(bars["free"].at[slot]))
            source = refs["k"].at[it.batch, kv_head, pl.ds(j * width, width)]
            plgpu.copy_gmem_to_smem(source, self.smem["k"].at[slot], bars["full"].at[slot])

        lax.fori_loop(first, tiles, load, None)
        return self.step(done, tiles, first)

    def drain(self, steps: Array) -> None:
        super().drain(steps)
        plgpu.barrier_wait(self.bars["rows_free"])

    def begin_item(self) -> None:
        plgpu.barrier_wait(self.bars["rows_full"])

    def end_item(self) -> None:
        plgpu.barrier_arrive(self.bars["rows_free"])

    def product(self, warpgroup: Array, first: Array) -> Array:
        slot = lax.rem(first, self.stages)
        plgpu.barrier_wait(self.bars["full"].at[slot])
        own = self.smem["q"].at[pl.ds(warpgroup * ROWS, ROWS)]

        def run(acc: Any) -> Array:
            plgpu.wgmma(acc, own, self.smem["k"].at[slot].T)
            return acc[...]

        logits = pl.run_scoped(run, plgpu.ACC((ROWS, self.width), jnp.float32))
        plgpu.barrier_arrive(self.bars["free"].at[slot])
        return logits
