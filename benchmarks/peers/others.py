"""Kernels of other projects on one problem, with torch: `python -m benchmarks.peers.others JOB`."""

import functools
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.kernels.masks import BLOCK, padded
from benchmarks.peers.measure import serve
from benchmarks.peers.problems import (
    INPUTS,
    Problem,
    draw_bits,
    lists,
    mask_of,
    read_input,
    split_lists,
)
from benchmarks.report import versions


class Torch:
    """Kernels with automatic differentiation on arrays [B, S, H, D], or [B, H, S, D].

    Attributes:
        kinds: of problems that it computes.
        module: what it needs.
        packages: with recorded versions.
    """

    masked, heads_first, deterministic = True, False, False
    kinds: tuple[str, ...] = ("lists",)
    module = "torch"
    packages: tuple[str, ...] = ()

    def __init__(self, problem: Problem, job: dict[str, Any]) -> None:
        self.problem, self.folder, self.seed = problem, Path(job["folder"]), job["seed"]
        self.torch = torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise ImportError("torch sees no CUDA device")
        self.lib = importlib.import_module(self.module)
        self.drawn = draw_bits(problem, self.seed)
        self.wait = lambda x: (torch.cuda.synchronize(), x)[1]
        self.same = lambda *xs: torch.equal(*(x.contiguous().view(torch.int16) for x in xs))
        self.block = lambda x, batch, head, rows: x[batch, rows, head].float().cpu().numpy()
        self.memory = lambda: (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
        self.swapped = lambda x: x.transpose(1, 2) if self.heads_first else x

    def load(self) -> None:
        torch = self.torch
        arange = functools.partial(torch.arange, device="cuda")
        self.xp = SimpleNamespace(**vars(torch) | {"arange": arange})
        arrays = [torch.from_numpy(np.array(read_input(self.folder, name))) for name in INPUTS]
        arrays = [self.swapped(x.cuda().view(torch.bfloat16)).contiguous() for x in arrays]
        *self.detached, self.dout = arrays
        self.inputs = [x.detach().requires_grad_() for x in self.detached]
        self.bits = torch.from_numpy(self.drawn.view(np.int32)).cuda()
        device, found = torch.cuda.get_device_name(), versions("torch", *self.packages)
        self.about = {"device": device, "versions": found}
        torch.cuda.reset_peak_memory_stats()

    def mask(self) -> Any:
        return mask_of(self.xp, self.bits, self.problem.num_blocks)

    def build(self) -> Any:
        return None

    def attention(self, index: Any) -> Any:
        """The output, differentiable."""

    def forward(self, index: Any) -> Any:
        out = self.attention(index)
        return self.swapped(out.detach()), out

    def backward(self, saved: Any) -> Sequence[Any]:
        grads = self.torch.autograd.grad(saved[1], self.inputs, self.dout, retain_graph=True)
        return [self.swapped(x) for x in grads]

    def total(self) -> Any:
        return self.backward(self.forward(self.build()))


class Flash4(Torch):
    """FlashAttention-4. A mask function cuts the diagonal's blocks; others are listed apart."""

    kinds, module = ("lists", "dense"), "flash_attn.cute"
    packages = "flash-attn-4", "nvidia-cutlass-dsl"

    def build(self) -> Any:
        if self.problem.kind == "dense":
            return None
        sparse = importlib.import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
        mask, size = self.mask(), (BLOCK, BLOCK)
        by_keys = mask.transpose(-1, -2).contiguous()
        longest = int(self.problem.widths(self.seed).max())
        forward, backward = (longest, mask), (None, by_keys)
        return [sparse(*self.lists(x, width), block_size=size) for width, x in (forward, backward)]

    def lists(self, mask: Any, width: int | None) -> tuple[Any, ...]:
        return split_lists(self.xp, mask, width)

    def attention(self, index: Any) -> Any:
        options: dict[str, Any] = {"causal": True}
        if index is not None:
            options = dict(block_sparse_tensors=index[0], block_sparse_tensors_bwd=index[1])
            options["mask_mod"] = _causal() if self.masked else None
        call = self.lib.flash_attn_func
        return call(*self.inputs, deterministic=self.deterministic, **options)[0]


@functools.cache
def _causal() -> Any:
    """A mask function in the language of FlashAttention-4's kernels."""

    @importlib.import_module("cutlass.cute").jit
    def causal(batch, head, query, key, lengths, arrays):
        return key <= query

    return causal


class Flash4Unmasked(Flash4):
    """The same without a mask inside of blocks."""

    masked, kinds = False, ("lists",)

    def lists(self, mask: Any, width: int | None) -> tuple[Any, ...]:
        none = self.torch.zeros_like(mask[..., 0], dtype=self.torch.int32)
        return none, none[..., None], *lists(self.xp, mask, width)


class Flash4Deterministic(Flash4):
    """The same with gradients that repeat their bits; not implemented for lists on SM90."""

    deterministic, kinds = True, ("dense",)


class CudnnSparse(Torch):
    """Block-sparse attention of nvidia-cudnn-frontend, without a mask inside of blocks."""

    masked, module = False, "cudnn.block_sparse_attention"
    packages = "nvidia-cudnn-frontend", "nvidia-cutlass-dsl"

    def build(self) -> Any:
        longest = int(self.problem.widths(self.seed).max())
        counts, numbers = lists(self.xp, self.mask(), longest)
        index = dict(q2k_block_index=numbers.contiguous(), q2k_block_nums=counts, layout="bshd")
        return index | dict(block_sparse_num=numbers.shape[-1], sparse_block_size=BLOCK)

    def forward(self, index: Any) -> Any:
        found = self.lib.block_sparse_attention_forward(*self.detached, **index)
        return found["o_tensor"], found["lse_tensor"], index

    def backward(self, saved: Any) -> Sequence[Any]:
        out, lse, index = saved
        call = self.lib.block_sparse_attention_backward
        grads = call(self.dout, *self.detached, out, lse, **index)
        return [grads[name] for name in ("dq_tensor", "dk_tensor", "dv_tensor")]


class Flex(Torch):
    """FlexAttention of torch."""

    heads_first, module, packages = True, "torch.nn.attention.flex_attention", ("triton",)

    def build(self) -> Any:
        mask, rows = self.mask(), self.xp.arange(self.problem.num_blocks)
        own = mask & (rows[:, None] == rows)
        return self.lib.BlockMask.from_kv_blocks(
            *lists(self.xp, own), *lists(self.xp, mask & ~own), BLOCK_SIZE=BLOCK,
            mask_mod=_not_later, seq_lengths=(self.problem.seq_len,) * 2,
        )  # fmt: skip

    @functools.cached_property
    def compiled(self) -> Any:
        return self.torch.compile(self.lib.flex_attention, dynamic=False)

    def attention(self, index: Any) -> Any:
        return self.compiled(*self.inputs, block_mask=index, enable_gqa=True)


def _not_later(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """One function for all masks, because FlexAttention compiles once for each."""
    return query >= key


class Flash2(Torch):
    """The dense flash attention of torch."""

    kinds, heads_first, module = ("dense",), True, "torch.nn.attention"
    backend = "FLASH_ATTENTION"

    def attention(self, index: Any) -> Any:
        call = self.torch.nn.functional.scaled_dot_product_attention
        with self.lib.sdpa_kernel(getattr(self.lib.SDPBackend, self.backend)):
            return call(*self.inputs, is_causal=True, enable_gqa=True)


class Cudnn(Flash2):
    """The dense attention of cuDNN, called by torch."""

    backend, packages = "CUDNN_ATTENTION", ("nvidia-cudnn-cu13",)


class Mtraining(Torch):
    """The Triton kernels of MTraining's authors, from a checkout of microsoft/MInference.

    Two files of its branch wenxuan/mtrain are read: pit_sparse_flash_attention_v3.py and
    op_utils/vertical_slash_utils.py in minference/ops, without the package around them.
    """

    kinds, packages = ("lists", "columns"), ("triton",)

    def __init__(self, problem: Problem, job: dict[str, Any]) -> None:
        super().__init__(problem, job)
        if not job["reference"]:
            raise ImportError("no --reference")
        sys.path.insert(0, str(Path(job["reference"]) / "minference"))
        self.lib = importlib.import_module("ops.pit_sparse_flash_attention_v3")

    def load(self) -> None:
        super().load()
        if self.problem.kind == "columns":  # padded: slashes with -1, columns with at least one
            drawn, padded_lists = self.problem.slashes(self.seed), []
            for heads, padding in ((drawn.verticals, 2**31 - 1), (drawn.diagonals, -1)):
                longest = max(map(len, heads))
                scaled = [x * (1 if padding > 0 else BLOCK) for x in heads]
                array = padded(scaled, longest + (-longest % BLOCK or BLOCK), padding)[None]
                padded_lists.append(self.torch.from_numpy(array).cuda())
            self.drawn = padded_lists

    def build(self) -> Any:
        if self.problem.kind == "columns":
            inputs = *self.detached[:2], *self.drawn, self.problem.seq_len, BLOCK
            blocks, *columns = self.lib.build_index_local(*inputs)
        else:
            blocks = self.mask()
            none = self.torch.zeros_like(blocks[..., :2], dtype=self.torch.int32)
            columns = none[..., :1], none
        return *columns, *self.lib.convert_blockmask(blocks, BLOCK, 64)

    def forward(self, index: Any) -> Any:
        scale, call = self.problem.dim**-0.5, self.lib.block_bar_attn_fwd
        return *call(*self.detached, None, None, scale, *index, granularity=BLOCK), index

    def backward(self, saved: Any) -> Sequence[Any]:
        out, lse, index = saved
        inputs = self.dout, *self.detached, out, None, None, None, lse, self.problem.dim**-0.5
        call = self.lib.block_bar_attn_bwd
        return call(*inputs, *index, granularity=BLOCK, deterministic=False)


PEERS: dict[str, type[Torch]] = {
    "FlashAttention-4": Flash4,
    "FlashAttention-4, unmasked": Flash4Unmasked,
    "FlashAttention-4, deterministic": Flash4Deterministic,
    "cuDNN block-sparse, unmasked": CudnnSparse,
    "cuDNN": Cudnn,
    "torch flash": Flash2,
    "FlexAttention": Flex,
    "MTraining Triton": Mtraining,
}


if __name__ == "__main__":
    serve(PEERS.__getitem__)
