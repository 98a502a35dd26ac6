"""The dense causal flash attention of torch, with `enable_gqa`: a worker (`child.py`)."""

import functools

from benchmarks.kernels.peers.child import MissingError, median_ms, normal, serve

_SHORT = 256  # tokens of a first call


def prepare(torch, problem):
    """Returns a row for each of the shapes, [n, (seq_len, heads, kv_heads, dim)]."""
    torch.manual_seed(int(problem["seed"]))
    try:
        for _, *rest in problem["shapes"].tolist():
            _measure(torch, (_SHORT, *rest), 1)
    except RuntimeError as error:
        raise MissingError(f"no flash attention: {str(error).splitlines()[0]}") from error
    repeats = int(problem["repeats"])
    shapes = problem["shapes"].tolist()
    return "enable_gqa", [functools.partial(_measure, torch, x, repeats) for x in shapes]


def _measure(torch, shape, repeats):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    seq_len, heads, kv_heads, dim = shape
    q, k, v, dout = (normal(torch, 1, h, seq_len, dim) for h in (heads, kv_heads, kv_heads, heads))
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def forward():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)

    out = forward()

    def backward():
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    return {f.__name__: median_ms(torch, f, repeats) for f in (forward, backward)}


if __name__ == "__main__":
    serve(prepare)
