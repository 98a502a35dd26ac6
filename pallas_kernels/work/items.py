"""Work items, stored as rows of an array that kernels read, their fields in column order."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

ITEM_FIELDS = 8  # columns of every list, not all of them used

KEY_BLOCKS, KEY_COLUMNS, KEY_PARTS = range(3)  # values of `KeyItem.kind`


class QueryItem(NamedTuple):
    """A block of 128 queries of one head, for the forward kernel and the one for dq."""

    batch: Array
    head: Array
    block: Array
    first: Array  # its first entry in the list of key blocks
    tiles: Array  # number of key blocks
    column_tiles: Array  # one past the last tile of gathered columns that it processes
    past_tiles: Array  # one past the last of these that needs no test by position
    first_column_tile: Array | None = None  # the first of these; None if it is 0 in all items

    def from_first(self, column_tile: Array) -> Array:
        if self.first_column_tile is None:
            return column_tile
        return column_tile - self.first_column_tile

    def column_tile(self, number: Array) -> Array:
        return number if self.first_column_tile is None else number + self.first_column_tile

    @property
    def steps(self) -> Array:
        return self.tiles + self.from_first(self.column_tiles)


Values = Any  # scalars in a kernel; arrays, views of them or numbers where lists are built


class KeyItem(NamedTuple):
    """128 keys, for the kernel for dk and dv and for the fused backward kernel."""

    kind: Values  # a key block, a tile of gathered columns, or a part of a block's query blocks
    batch: Values
    # Query head of columns; key/value head of a block, or in the fused kernel the first query head.
    head: Values
    block: Values  # number of the key block or column tile
    first_row: Values  # columns: the first query block that may see one; a part: its number
    full_row: Values  # columns: the first query block after all; a part: the slot of its sums
    # In the fused kernel, 1 if query blocks rise and -1 if they fall; for columns with
    # `KeyWork.ends`, one past the last query block.
    sign: Values
    key_turn: Values  # in the fused kernel, the turn at which the item adds to its dk and dv

    @property
    def columns(self) -> Array:
        return self.kind == KEY_COLUMNS

    @property
    def part(self) -> Array:
        return self.kind == KEY_PARTS

    @property
    def blocks(self) -> Array:
        return self.kind == KEY_BLOCKS


def pack(item: QueryItem | KeyItem) -> Array:
    """Packs an item with array or scalar fields into int32 [..., 8]."""
    given = [0 if x is None else x for x in item]
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in given))
    fields = [jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape) for x in given]
    fields += [jnp.zeros(shape, jnp.int32)] * (ITEM_FIELDS - len(fields))
    return jnp.stack(fields, axis=-1)


def read[Item: (QueryItem, KeyItem)](
    kind: type[Item], items: Any, n: Array, fields: int | None = None
) -> Item:
    """Reads the n-th item of a list in global memory; its first `fields` fields, or all."""
    return kind(*(items[n, column] for column in range(fields or len(kind._fields))))


def column_of(kind: type[QueryItem | KeyItem], field: str) -> int:
    return kind._fields.index(field)
