"""FlexAttention of torch on a block mask, as a child process of the attention benchmark.

Reads a file with the mask, compiles, prints {"ready": ...}, waits for a line on standard input
(the device must then be idle) and prints its times as one line of JSON.
"""

import json
import statistics
import sys

import numpy as np


def main(path: str) -> None:
    """Measures the problem of an .npz file: mask (packed bits), seq_len, heads, kv_heads, dim."""
    try:
        import torch
        import triton
        from torch.nn.attention.flex_attention import BlockMask, flex_attention
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), flush=True)
        return
    if not torch.cuda.is_available():
        print(json.dumps({"missing": "torch sees no CUDA device"}), flush=True)
        return
    problem = np.load(path)
    seq_len, heads, kv_heads, dim = (
        int(problem[name]) for name in ("seq_len", "heads", "kv_heads", "dim")
    )
    blocks = seq_len // 128
    mask = np.unpackbits(problem["mask"], count=heads * blocks**2).astype(bool)
    mask = torch.from_numpy(mask.reshape(1, heads, blocks, blocks)).cuda()
    diagonal = torch.eye(blocks, dtype=torch.bool, device="cuda") & mask
    block_mask = BlockMask.from_kv_blocks(
        *_lists(torch, diagonal), *_lists(torch, mask & ~diagonal), BLOCK_SIZE=128,
        mask_mod=lambda b, h, q, k: q >= k,
    )
    torch.manual_seed(int(problem["seed"]))

    def normal(heads):
        return torch.randn(1, heads, seq_len, dim, dtype=torch.bfloat16, device="cuda")

    q, k, v, dout = normal(heads), normal(kv_heads), normal(kv_heads), normal(heads)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    attention = torch.compile(flex_attention)

    def forward():
        return attention(*inputs, block_mask=block_mask, enable_gqa=True)

    out = forward()

    def backward():
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    backward()
    torch.cuda.synchronize()
    print(json.dumps({"ready": f"torch {torch.__version__}, Triton {triton.__version__}"}),
          flush=True)
    sys.stdin.readline()
    repeats = int(problem["repeats"])
    times = {f.__name__: _median_ms(torch, f, repeats) for f in (forward, backward)}
    print(json.dumps(times), flush=True)


def _lists(torch, mask):
    """Counts and, per row, the active key blocks first."""
    order = torch.argsort(mask.int(), dim=-1, descending=True, stable=True)
    return mask.sum(-1).int(), order.int()


def _median_ms(torch, run, repeats: int) -> float:
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


if __name__ == "__main__":
    main(sys.argv[1])
