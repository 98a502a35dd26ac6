"""FlexAttention of torch on a block mask: a worker (`child.py`)."""

import numpy as np

from benchmarks.kernels.peers.child import median_ms, normal, serve


def prepare(torch, problem):
    """Compiles for the shape and mask (packed bits); returns one row."""
    import triton
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    seq_len, heads, kv_heads, dim = problem["shapes"][0].tolist()
    blocks = seq_len // 128
    mask = np.unpackbits(problem["mask"], count=heads * blocks**2).astype(bool)
    mask = torch.from_numpy(mask.reshape(1, heads, blocks, blocks)).cuda()
    diagonal = torch.eye(blocks, dtype=torch.bool, device="cuda") & mask
    block_mask = BlockMask.from_kv_blocks(
        *_lists(torch, diagonal),
        *_lists(torch, mask & ~diagonal),
        BLOCK_SIZE=128,
        mask_mod=lambda b, h, q, k: q >= k,
    )
    torch.manual_seed(int(problem["seed"]))
    q, k, v, dout = (normal(torch, 1, h, seq_len, dim) for h in (heads, kv_heads, kv_heads, heads))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    attention = torch.compile(flex_attention)

    def forward():
        return attention(*inputs, block_mask=block_mask, enable_gqa=True)

    out = forward()

    def backward():
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    backward()
    torch.cuda.synchronize()
    repeats = int(problem["repeats"])

    def row():
        return {f.__name__: median_ms(torch, f, repeats) for f in (forward, backward)}

    return f"Triton {triton.__version__}", [row]


def _lists(torch, mask):
    """Counts per row, and block numbers with the active ones first."""
    order = torch.argsort(mask.int(), dim=-1, descending=True, stable=True)
    return mask.sum(-1).int(), order.int()


if __name__ == "__main__":
    serve(prepare)
