"""Baselines in torch, timed by a worker of the attention benchmark that needs no JAX.

The reference is the Triton kernels of MTraining's authors. They come from a checkout of
microsoft/MInference (branch wenxuan/mtrain). Two of its files are read:
`minference/ops/pit_sparse_flash_attention_v3.py` and `op_utils/vertical_slash_utils.py` next to it.
Slashes are whole block diagonals here, as in all masks.
"""

import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import workers
from benchmarks.kernels.masks import Work, block_mask, padded, slash_mask
from benchmarks.kernels.rows import Row, Shape

_BLOCK, _TILE = 128, 64  # queries, and keys, of one step of the reference's kernels
_PAST = 2147483647  # pads its lists of columns
_FILES = "pit_sparse_flash_attention_v3.py", "op_utils/vertical_slash_utils.py"


class MissingError(Exception):
    """Why a baseline cannot run here, in one sentence."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """A baseline on some shapes and masks (letters), with the arguments of its worker.

    Attributes:
        name: one of `PEERS`.
        seed: of masks and inputs.
        repeats: runs per median.
        problems: shape and mask of each row.
        checkout: folder of the reference.
    """

    name: str
    seed: int
    repeats: int
    problems: Sequence[tuple[Shape, str]]
    checkout: str = ""

    def job(self, python: str) -> workers.Job:
        """Its worker, run by a Python that has torch."""
        options = json.dumps(dataclasses.asdict(self))
        return self.name, workers.command("benchmarks.kernels.peers", options, python=python)


def flash(torch: Any, peer: Peer, shape: Shape, mask: str, repeats: int) -> dict[str, Any]:
    """The dense causal flash attention of torch, with `enable_gqa`."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attention(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    try:
        return _times(torch, attention, shape, repeats)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise MissingError(f"no flash attention: {str(error).splitlines()[0]}") from error


def flex(torch: Any, peer: Peer, shape: Shape, mask: str, repeats: int) -> dict[str, Any]:
    """FlexAttention of torch on a block mask."""
    from torch.nn.attention.flex_attention import BlockMask

    blocks = torch.from_numpy(block_mask(shape.rng(mask, peer.seed), shape.heads, shape.seq_len))
    blocks = blocks[None].cuda()
    diagonal = torch.eye(blocks.shape[-1], dtype=torch.bool, device="cuda") & blocks

    def lists(mask: Any) -> tuple[Any, Any]:
        """Counts per row, and block numbers with the active ones first."""
        order = torch.argsort(mask.int(), dim=-1, descending=True, stable=True)
        return mask.sum(-1).int(), order.int()

    index = BlockMask.from_kv_blocks(
        *lists(diagonal), *lists(blocks & ~diagonal), BLOCK_SIZE=128,
        mask_mod=lambda b, h, q, k: q >= k,
    )  # fmt: skip
    attention = functools.partial(_compiled_flex(torch), block_mask=index, enable_gqa=True)
    return _times(torch, attention, shape, repeats) | {"work": Work(int(blocks.sum()))}


@functools.cache
def _compiled_flex(torch: Any) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def mtraining(torch: Any, peer: Peer, shape: Shape, mask: str, repeats: int) -> dict[str, Any]:
    """The Triton kernels of MTraining's authors."""
    kernels = reference_kernels(Path(peer.checkout))
    wanted = slash_mask(mask, shape.rng(mask, peer.seed), shape.heads, shape.seq_len)
    lists = []  # of slashes, padded with -1, and of columns, with at least one padding entry
    for heads, scale, padding in ((wanted.diagonals, _BLOCK, -1), (wanted.verticals, 1, _PAST)):
        longest = max(map(len, heads))
        capacity = longest + (-longest % _BLOCK or _BLOCK)
        scaled = [values * scale for values in heads]
        lists.append(torch.from_numpy(padded(scaled, capacity, padding))[None].cuda())
    slashes, columns = lists
    q, k, v, dout = (_normal(torch, 1, shape.seq_len, n, shape.dim) for n in _heads(shape))
    scale = shape.dim**-0.5

    def build() -> tuple[Any, ...]:
        blocks, bars, bar_counts = kernels.build_index_local(
            q, k, columns, slashes, shape.seq_len, _BLOCK
        )
        tiles, counts = kernels.convert_blockmask(blocks, _BLOCK, _TILE)
        return bars, bar_counts, tiles, counts

    index = build()

    def forward() -> tuple[Any, Any]:
        return kernels.block_bar_attn_fwd(
            q, k, v, None, None, scale, *index, granularity=_BLOCK, step=0
        )

    out, lse = forward()

    def backward() -> Any:
        inputs = dout, q, k, v, out, None, None, None, lse, scale, *index
        return kernels.block_bar_attn_bwd(*inputs, granularity=_BLOCK, deterministic=False, step=0)

    _, bar_counts, _, counts = index
    work = Work(int(counts.sum()) // (_BLOCK // _TILE), int(bar_counts[..., -1].sum()))
    if work != wanted.work():
        sys.exit(f"error: the reference on mask {mask} executes {work}, not {wanted.work()}")
    times = {f.__name__: _median_ms(torch, f, repeats) for f in (build, forward, backward)}
    return times | {"work": work}


@functools.cache
def reference_kernels(checkout: Path) -> Any:
    """The module of the reference, without the package around it, which imports far more."""
    folder = checkout / "minference" / "ops"
    for name in _FILES:
        if not (folder / name).is_file():
            raise MissingError(f"{folder / name} does not exist")
    sys.path.insert(0, str(folder.parent))
    from ops import pit_sparse_flash_attention_v3

    return pit_sparse_flash_attention_v3


def _heads(shape: Shape) -> tuple[int, ...]:
    return shape.heads, shape.kv_heads, shape.kv_heads, shape.heads


def _normal(torch: Any, *shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def _times(
    torch: Any, attention: Callable[..., Any], shape: Shape, repeats: int
) -> dict[str, float]:
    """Times of both passes of a differentiable attention on heads-first arrays."""
    q, k, v, dout = (_normal(torch, 1, n, shape.seq_len, shape.dim) for n in _heads(shape))
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def forward() -> Any:
        return attention(*inputs)

    out = forward()

    def backward() -> Any:
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    return {f.__name__: _median_ms(torch, f, repeats) for f in (forward, backward)}


def _median_ms(torch: Any, run: Callable[[], Any], repeats: int) -> float:
    """Median device time, after two warm-up calls."""
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


PEERS = {"torch flash": flash, "FlexAttention": flex, "reference": mtraining}


def main(text: str) -> None:
    """A worker: compiles, waits for its turn, and sends a row for each problem."""
    values = json.loads(text)
    problems = [(Shape(**shape), mask) for shape, mask in values.pop("problems")]
    peer = Peer(**values, problems=problems)
    try:
        import torch

        if not torch.cuda.is_available():
            raise MissingError("torch sees no CUDA device")
        torch.manual_seed(peer.seed)
        measure = functools.partial(PEERS[peer.name], torch, peer)
        for shape, mask in problems:
            measure(shape, mask, repeats=1)
            torch.cuda.empty_cache()  # others measure before this worker's turn
    except (ImportError, MissingError) as error:
        workers.skip(str(error))
        return
    if not workers.my_turn(f"torch {torch.__version__}"):
        return
    for shape, mask in problems:
        row = Row(shape, mask, peer.name, **measure(shape, mask, repeats=peer.repeats))
        row.total = row.forward + row.backward
        workers.send(dataclasses.asdict(row))


if __name__ == "__main__":
    main(sys.argv[1])
