"""Hopper kernel for products of rows sorted by group, each with the matrix of its group.

The rows of each group fill whole tiles of 128, so no tile has rows of two groups. Thread blocks are
persistent: one warpgroup copies operands, also of the next item, and two compute 64 rows each.
"""

# pyright: reportPrivateImportUsage=false
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu.common import ROWS, WARPGROUPS, await_last, launch, tiled
from pallas_kernels.mosaic_gpu.device import multiprocessors

ROW_TILE, WIDTH = WARPGROUPS * ROWS, 256  # of an output tile
_DEPTH = 64  # terms of a step's products
_STAGES = 4
_COMPUTE_REGISTERS, _MEMORY_REGISTERS = 232, 40

# y = x W^T and x = y W of rows; W = y^T x of groups.
Kind = Literal["dot", "transposed", "outer"]


class _Item(NamedTuple):
    """An output tile: the slices of the operands' step i, the number of steps, and its place."""

    a: Callable[[Array], tuple[Any, ...]]
    b: Callable[[Array], tuple[Any, ...]]
    steps: Array
    used: Array | bool
    out: Callable[[Any], tuple[Any, ...]]  # of the rows of a warpgroup


def grouped_product(kind: Kind, a: Array, b: Array, sizes: Array, interpret: Any = False) -> Array:
    """Computes one kind of product; `sizes` int32 [G] are multiples of `ROW_TILE`.

    Args:
        kind: "dot": rows [R, I], weights [G, O, I] -> [R, O]; "transposed": [R, O], [G, O, I] ->
            [R, I]; "outer": [R, O], [R, I] -> fp32 [G, O, I]. O and I are multiples of `WIDTH`.
            Result rows after those of all groups are undefined.
    """
    rows, ends = a.shape[0], jnp.cumsum(sizes, dtype=jnp.int32)
    if kind == "outer":
        shape, dtype = (len(sizes), a.shape[1], b.shape[1]), jnp.dtype(jnp.float32)
        table = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    else:
        columns = b.shape[1] if kind == "dot" else b.shape[2]
        shape, dtype = (rows, columns), a.dtype
        tiles = jnp.arange(rows // ROW_TILE, dtype=jnp.int32) * ROW_TILE
        found = jnp.searchsorted(ends, tiles, side="right").astype(jnp.int32)
        table = jnp.where(found < len(sizes), found, -1)  # the group of each row tile
    row_tiles, column_tiles = shape[-2] // ROW_TILE, shape[-1] // WIDTH
    items = row_tiles * column_tiles * (shape[0] if kind == "outer" else 1)
    num_blocks = min(multiprocessors(interpret), items)

    def item_of(refs: dict[str, Any], n: Array) -> _Item:
        number = lax.axis_index("block") + n * num_blocks
        column, row = lax.rem(number, column_tiles), lax.div(number, column_tiles)
        columns = pl.ds(column * WIDTH, WIDTH)
        if kind == "outer":
            group, row = lax.div(row, row_tiles), lax.rem(row, row_tiles)
            start, end = refs["table"][group], refs["table"][group + 1]

            def depth(i: Array) -> Any:
                return pl.ds(pl.multiple_of(start + i * _DEPTH, _DEPTH), _DEPTH)

            return _Item(
                lambda i: (depth(i), pl.ds(row * ROW_TILE, ROW_TILE)),
                lambda i: (depth(i), columns),
                lax.div(end - start, _DEPTH),
                True,
                lambda own: (group, pl.ds(row * ROW_TILE + own, ROWS), columns),
            )
        group = refs["table"][row]
        used = group >= 0
        group = lax.max(group, 0)

        def weights(i: Array) -> tuple[Any, ...]:
            terms = pl.ds(i * _DEPTH, _DEPTH)
            return (group, columns, terms) if kind == "dot" else (group, terms, columns)

        return _Item(
            lambda i: (pl.ds(row * ROW_TILE, ROW_TILE), pl.ds(i * _DEPTH, _DEPTH)),
            weights,
            jnp.where(used, a.shape[1] // _DEPTH, 0),
            used,
            lambda own: (pl.ds(row * ROW_TILE + own, ROWS), columns),
        )

    def kernel(refs: dict[str, Any]) -> None:
        smem, bars, warpgroup = refs["smem"], refs["bars"], lax.axis_index("wg")
        count = lax.div(items - lax.axis_index("block") + num_blocks - 1, num_blocks)

        def memory_warpgroup() -> None:
            plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")

            def load_item(n: Array, done: Array) -> Array:
                item = item_of(refs, n)

                def load(i: Array, _: None) -> None:
                    slot = lax.rem(done + i, _STAGES)
                    pl.when(done + i >= _STAGES)(lambda: plgpu.barrier_wait(bars["free"].at[slot]))
                    for name, place in (("a", item.a(i)), ("b", item.b(i))):
                        source, full = refs[name].at[place], bars["full"].at[slot]
                        plgpu.copy_gmem_to_smem(source, smem[name].at[slot], full)

                lax.fori_loop(0, item.steps, load, None)
                return done + item.steps

            total = lax.fori_loop(0, count, load_item, jnp.int32(0))
            await_last([bars["free"]], total, _STAGES)

        def compute_warpgroup() -> None:
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            own = warpgroup * ROWS

            def operands(slot: Array) -> tuple[Any, Any]:
                if kind == "outer":
                    return smem["a"].at[slot, :, pl.ds(own, ROWS)].T, smem["b"].at[slot]
                b = smem["b"].at[slot]
                return smem["a"].at[slot, pl.ds(own, ROWS)], b.T if kind == "dot" else b

            def compute_item(n: Array, done: Array) -> Array:
                item = item_of(refs, n)

                def accumulate(acc: Any) -> Array:
                    def step(i: Array, _: None) -> None:
                        slot = lax.rem(done + i, _STAGES)
                        plgpu.barrier_wait(bars["full"].at[slot])
                        plgpu.wgmma(acc, *operands(slot))
                        plgpu.wgmma_wait(1)
                        # Only this step is in flight: the memory of the previous one is free.
                        before = lax.rem(done + i + _STAGES - 1, _STAGES)
                        pl.when(i > 0)(lambda: plgpu.barrier_arrive(bars["free"].at[before]))

                    lax.fori_loop(0, item.steps, step, None)
                    return acc[...]

                values = pl.run_scoped(accumulate, plgpu.ACC((ROWS, WIDTH), jnp.float32))
                last = lax.rem(done + item.steps + _STAGES - 1, _STAGES)
                pl.when(item.steps > 0)(lambda: plgpu.barrier_arrive(bars["free"].at[last]))

                def store() -> None:
                    refs["out"].at[item.out(own)][...] = values.astype(dtype)

                store() if item.used is True else pl.when(item.used)(store)
                return done + item.steps

            lax.fori_loop(0, count, compute_item, jnp.int32(0))

        pl.when(warpgroup == WARPGROUPS)(memory_warpgroup)
        pl.when(warpgroup < WARPGROUPS)(compute_warpgroup)

    kernel.__name__ = f"grouped_{kind}"
    a_tile = (_DEPTH, ROW_TILE) if kind == "outer" else (ROW_TILE, _DEPTH)
    b_tile = (WIDTH, _DEPTH) if kind == "dot" else (_DEPTH, WIDTH)
    tiles = {"a": (_STAGES, *a_tile), "b": (_STAGES, *b_tile)}
    smem = {name: tiled(tile, a.dtype) for name, tile in tiles.items()}
    bars = {
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
        "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=_STAGES),
    }
    inputs, outputs = {"a": a, "b": b, "table": table}, {"out": jax.ShapeDtypeStruct(shape, dtype)}
    return launch(kernel, inputs, outputs, smem, bars, num_blocks, interpret)["out"]
