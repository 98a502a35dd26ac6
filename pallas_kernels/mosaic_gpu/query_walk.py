"""Traversal of the kernels that own queries, forward and dq: key blocks, columns and masks."""

from typing import Any

from jax import Array, lax

from pallas_kernels.mosaic_gpu.common import GatheredColumns
from pallas_kernels.mosaic_gpu.masks import ColumnMask, DiagonalMask, QueryMask, WindowMask
from pallas_kernels.work.items import QueryItem, read
from pallas_kernels.work.lists import far_entry
from pallas_kernels.work.query_work import QueryWork


def work_operands(work: QueryWork, columns: GatheredColumns | None) -> dict[str, Array]:
    """Returns the operands that `QueryWalk` reads."""
    arrays = {"items": work.items, "lists": work.lists, "diagonal": work.diagonal}
    if work.run_first is not None and work.run_last is not None:
        arrays |= {"run_first": work.run_first, "run_last": work.run_last}
    return arrays | (columns.operands if columns is not None else {})


class QueryWalk:
    def __init__(self, refs: dict[str, Any], work: QueryWork):
        self.refs, self.listed, self.has_columns = refs, work.listed, "keep" in refs
        self.group = refs["q"].shape[2] // refs["k"].shape[2]
        self.window = work.window
        self.runs = None if work.run_first is None else work.run_first.shape[2]
        # All but the last field, unless it is used.
        self.fields = len(QueryItem._fields) - (not work.skips_columns)

    def item(self, n: Array) -> QueryItem:
        return read(QueryItem, self.refs["items"], n, self.fields)

    def key_block(self, it: QueryItem, s: Array) -> Array:
        return self.listed_block(it, it.first + s)

    def listed_block(self, it: QueryItem, entry: Array) -> Array:
        if self.listed:
            return self.refs["lists"][it.batch, it.head, it.block, entry]
        return it.block - self.refs["lists"][it.batch, it.head, entry]

    def run(self, it: QueryItem, number: Array | int) -> tuple[Array, Array]:
        if self.runs is None:
            return it.first, it.tiles
        at = it.batch, it.head, number, it.block
        first = self.refs["run_first"][at]
        return first, self.refs["run_last"][at] - first

    def segments(self, it: QueryItem, warpgroup: Array) -> list[tuple[Any, Any, QueryMask]]:
        """Returns runs of tiles that share a mask: (first step, one past the last, mask)."""
        one = lax.min(1, it.tiles)
        if self.window is not None:
            far = lax.min(far_entry(self.window), it.tiles)
            first, last = (WindowMask(self.window, warpgroup, first=x) for x in (True, False))
            return [(0, one, first), (one, far, QueryMask()), (far, it.tiles, last)]
        diagonal = DiagonalMask(self, it, warpgroup)
        parts = [(0, one, diagonal), (one, it.tiles, QueryMask())]
        if self.listed:
            before = it.tiles - one
            parts = [(0, before, QueryMask()), (before, it.tiles, diagonal)]
        if self.has_columns:
            past = it.tiles + it.from_first(it.past_tiles)
            parts.append((it.tiles, past, ColumnMask(self, it, warpgroup, causal=False)))
            parts.append((past, it.steps, ColumnMask(self, it, warpgroup, causal=True)))
        return parts

    def first_masks(self, it: QueryItem, warpgroup: Array) -> list[tuple[Array | bool, QueryMask]]:
        """Returns conditions and masks for the first tile of an item: the first that holds."""
        if self.window is not None:
            return [(True, WindowMask(self.window, warpgroup, first=True))]
        masks: list[tuple[Array | bool, QueryMask]] = [(True, DiagonalMask(self, it, warpgroup))]
        if self.listed:
            # No list entry is read for a first tile that is not the last one too: it has no mask.
            masks = [(it.tiles > 1, QueryMask()), (it.tiles == 1, masks[0][1])]
        if self.has_columns:
            masks[-1] = it.tiles > 0, masks[-1][1]
            masks.append((True, ColumnMask(self, it, warpgroup, causal=True)))
        return masks
