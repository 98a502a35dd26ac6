"""The Triton kernels of MTraining's authors: a worker (`child.py`).

They come from a checkout of microsoft/MInference (branch wenxuan/mtrain). Two of its files are
read: `minference/ops/pit_sparse_flash_attention_v3.py` and `op_utils/vertical_slash_utils.py` next
to it. Slashes are whole block diagonals here, as in all masks.
"""

import functools
import sys
from pathlib import Path

from benchmarks.kernels.peers.child import MissingError, median_ms, normal, serve

_BLOCK, _TILE = 128, 64  # queries, and keys, of one step of their kernels
_PAST = 2147483647  # pads their lists of columns
_SHORT = 2048  # tokens of a first call, which compiles
_FILES = "pit_sparse_flash_attention_v3.py", "op_utils/vertical_slash_utils.py"


def prepare(torch, problem):
    """Returns a row for each of the shapes, [n, (seq_len, heads, kv_heads, dim)].

    The n-th row computes block diagonals `diagonals_n` and columns `verticals_n`, both [heads, any]
    and padded with -1; `reference` is the folder of the checkout.
    """
    import triton

    torch.manual_seed(int(problem["seed"]))
    kernels = _kernels(Path(str(problem["reference"])))
    shapes = problem["shapes"].tolist()
    for dim in {shape[3] for shape in shapes}:
        heads, kv_heads = next(shape[1:3] for shape in shapes if shape[3] == dim)
        mask = _mask(torch, [[0, 1]] * heads, [[0, 1]] * heads)
        _measure(torch, kernels, (_SHORT, heads, kv_heads, dim), mask, 1)

    def row(n):
        mask = _mask(torch, problem[f"diagonals_{n}"], problem[f"verticals_{n}"])
        return _measure(torch, kernels, shapes[n], mask, int(problem["repeats"]))

    rows = [functools.partial(row, n) for n in range(len(shapes))]
    return f"Triton {triton.__version__}", rows


def _kernels(checkout):
    """The module of their kernels, without the package around it, which imports far more."""
    folder = checkout / "minference" / "ops"
    for name in _FILES:
        if not (folder / name).is_file():
            raise MissingError(f"{folder / name} does not exist")
    sys.path.insert(0, str(folder.parent))
    from ops import pit_sparse_flash_attention_v3

    return pit_sparse_flash_attention_v3


def _mask(torch, diagonals, verticals):
    """Their lists of slashes, padded with -1, and of columns, with at least one padding entry."""
    diagonals, verticals = (torch.as_tensor(x, dtype=torch.int32) for x in (diagonals, verticals))
    slashes = torch.where(diagonals < 0, -1, diagonals * _BLOCK)
    columns = torch.where(verticals < 0, _PAST, verticals).sort(-1).values
    return [
        torch.nn.functional.pad(x, (0, -x.shape[1] % _BLOCK or _BLOCK), value=value)[None].cuda()
        for x, value in ((slashes, -1), (columns, _PAST))
    ]


def _measure(torch, kernels, shape, mask, repeats):
    seq_len, heads, kv_heads, dim = shape
    slashes, columns = mask
    q, k, v, dout = (normal(torch, 1, seq_len, h, dim) for h in (heads, kv_heads, kv_heads, heads))
    scale = dim**-0.5

    def build():
        blocks, bars, bar_counts = kernels.build_index_local(
            q, k, columns, slashes, seq_len, _BLOCK
        )
        lists, counts = kernels.convert_blockmask(blocks, _BLOCK, _TILE)
        return bars, bar_counts, lists, counts

    index = build()

    def forward():
        return kernels.block_bar_attn_fwd(
            q, k, v, None, None, scale, *index, granularity=_BLOCK, step=0
        )

    out, lse = forward()

    def backward():
        inputs = dout, q, k, v, out, None, None, None, lse, scale, *index
        return kernels.block_bar_attn_bwd(*inputs, granularity=_BLOCK, deterministic=False, step=0)

    _, bar_counts, _, counts = index
    times = {f.__name__: median_ms(torch, f, repeats) for f in (build, forward, backward)}
    tiles = int(counts.sum()) // (_BLOCK // _TILE)
    return times | {"tiles": tiles, "bars": int(bar_counts[..., -1].sum())}


if __name__ == "__main__":
    serve(prepare)
