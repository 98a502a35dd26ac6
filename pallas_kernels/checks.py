"""Shape checks of kernel calls, before anything is traced into a kernel."""

from jax import Array

from pallas_kernels.tiles import (
    COLUMN_TILE,
    DiagonalTiles,
    SegmentedDiagonals,
    Tiles,
    VerticalColumns,
)


def check_call(
    q: Array, k: Array, v: Array, tiles: Tiles | None, verticals: VerticalColumns | None
) -> None:
    """Checks what `forward` and `backward` share; shapes as documented there.

    Raises:
        ValueError: naming the argument, its shape and what it must be.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {x.shape}: [batch, tokens, heads, dim] is needed")
    if k.shape != v.shape:
        raise ValueError(f"k has shape {k.shape} and v {v.shape}: they must be equal")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q has shape {q.shape} and k {k.shape}: batch and head dim must be equal"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads and k {k.shape[2]}: query heads must be a multiple of "
            "key/value heads"
        )
    if tiles is None and verticals is None:
        raise ValueError("neither tiles nor verticals given: there is nothing to compute")
    g = (tiles if tiles is not None else verticals).block_size
    for name, x in (("q", q), ("k", k)):
        if x.shape[1] % g:
            raise ValueError(
                f"{name} has {x.shape[1]} tokens: a multiple of block_size={g} is needed"
            )
    if tiles is not None:
        _check_tiles(q, k, tiles)
    if verticals is not None:
        _check_verticals(q, verticals, g)


def check_shape(name: str, x: Array, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `x` has that shape."""
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}: {shape} is needed")


def _check_tiles(q: Array, k: Array, tiles: Tiles) -> None:
    batch_and_heads = (q.shape[0], q.shape[2])
    if isinstance(tiles, DiagonalTiles):
        lists = {"offsets": tiles.offsets}
        check_shape("tiles.start", tiles.start, batch_and_heads)
        check_shape("tiles.stop", tiles.stop, batch_and_heads)
    elif isinstance(tiles, SegmentedDiagonals):
        lists = {"offsets": tiles.offsets}
        runs = (*batch_and_heads, *tiles.segment.shape)
        check_shape("tiles.start", tiles.start, runs)
        check_shape("tiles.stop", tiles.stop, runs)
        if k.shape[1] % (tiles.num_segments * tiles.block_size):
            raise ValueError(
                f"k has {k.shape[1]} tokens: a multiple of num_segments={tiles.num_segments} x "
                f"block_size={tiles.block_size} is needed"
            )
    else:
        rows, columns = (x.shape[1] // tiles.block_size for x in (q, k))
        lists = {"key_blocks": tiles.key_blocks, "query_blocks": tiles.query_blocks}
        check_shape("tiles.key_count", tiles.key_count, (*batch_and_heads, rows))
        check_shape("tiles.query_count", tiles.query_count, (*batch_and_heads, columns))
        check_shape(
            "tiles.key_blocks", tiles.key_blocks,
            (*batch_and_heads, rows, tiles.key_blocks.shape[-1]),
        )
        check_shape(
            "tiles.query_blocks", tiles.query_blocks,
            (*batch_and_heads, columns, tiles.query_blocks.shape[-1]),
        )
    for name, x in lists.items():
        if x.shape[:2] != batch_and_heads or x.shape[-1] == 0:
            raise ValueError(
                f"tiles.{name} has shape {x.shape}: [{q.shape[0]}, {q.shape[2]}, ...] with at "
                "least one entry in each list is needed"
            )


def _check_verticals(q: Array, verticals: VerticalColumns, block_size: int) -> None:
    batch, num_queries, heads, dim = q.shape
    if verticals.block_size != block_size:
        raise ValueError(
            f"verticals.block_size={verticals.block_size} is not that of the tiles, {block_size}"
        )
    capacity = verticals.tokens.shape[-1]
    if capacity == 0 or capacity % COLUMN_TILE:
        raise ValueError(
            f"verticals.tokens has {capacity} columns: a positive multiple of {COLUMN_TILE} is "
            "needed"
        )
    num_rows = num_queries // block_size
    check_shape("verticals.tokens", verticals.tokens, (batch, heads, capacity))
    check_shape("verticals.k", verticals.k, (batch, capacity, heads, dim))
    check_shape("verticals.v", verticals.v, (batch, capacity, heads, dim))
    check_shape("verticals.keep", verticals.keep, (batch, heads, num_rows, capacity // 32))
    check_shape("verticals.query_blocks", verticals.query_blocks, (num_rows,))
