"""Rates and sizes of the GPUs that a dry run estimates for, each with its source."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU, by measurement unless a line says otherwise.

    Attributes:
        kind: name, as JAX gives it.
        target_config: file in this folder, for compiling without the GPU.
        memory: bytes.
        matmul_flops: bf16 FLOP/s of a large matrix product.
        matmul_share: of `matmul_flops` that the products of a very wide model's step reach.
        matmul_half_width: width of a model whose norms, gates and casts between the products take
            as long as the products, which grow with the square of the width.
        sparse_forward, sparse_backward, dense_forward, dense_backward: executed FLOP/s of the
            attention kernels, by head width. Backward counts five products for each tile, as the
            benchmark tables do.
        copy_bytes: bytes/s that a copy reads and writes together.
        link_bytes: bytes/s into one GPU of an all-gather over the GPUs of a host.
        index_seconds: of choosing one index and building the kernels' work lists, on one GPU, for
            each query head and key.
    """

    kind: str
    target_config: str
    memory: int
    matmul_flops: float
    matmul_share: float
    matmul_half_width: float
    sparse_forward: dict[int, float]
    sparse_backward: dict[int, float]
    dense_forward: dict[int, float]
    dense_backward: dict[int, float]
    copy_bytes: float
    link_bytes: float
    index_seconds: float


H200 = Gpu(
    kind="NVIDIA H200",
    target_config="h200.target_config.txtpb",
    # device_memory_size of the target config.
    memory=150_109_880_320,
    # 8192^3, and a copy: measured on one H200 with jax 0.11.2, CUDA 13.
    matmul_flops=794e12,
    # benchmarks/results/step-{qwen3b-512k-h200x4,others-h200x2}-2026-11-22.md: all but attention
    # runs at 0.56 of that in a model 896 wide, at 0.71 with 2048 and at 0.74 with 3584.
    matmul_share=0.87,
    matmul_half_width=480,
    # benchmarks/results/attention-h200-2026-11-21-in-step.md: mask B at S = 524288.
    sparse_forward={64: 407e12, 128: 540e12},
    sparse_backward={64: 366e12, 128: 443e12},
    # benchmarks/results/attention-h200-2026-11-22.md, S = 131072; ring-h200x2-2026-11-22.md.
    dense_forward={64: 464e12, 128: 615e12},
    dense_backward={64: 495e12, 128: 555e12},
    copy_bytes=4.27e12,
    # 8 H200 of one host, shards of 256 MiB.
    link_bytes=261 * 2**30,
    # docs/log/2026-11-20.md: 0.87 ms for 16 heads and 131072 keys, caps of 4096.
    index_seconds=0.87e-3 / (16 * 131072),
)


def matmul_rate(gpu: Gpu, hidden_size: int) -> float:
    """FLOP/s of a training step without its attention, by the width of the model."""
    between = 1 + gpu.matmul_half_width / hidden_size
    return gpu.matmul_flops * gpu.matmul_share / between
