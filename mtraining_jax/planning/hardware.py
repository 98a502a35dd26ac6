"""Sizes and rates of the GPUs that a dry run estimates for, each with its source.

Those of attention and matrix products are in `mtraining_jax/latency.py`, for H200s.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU, by measurement unless a line says otherwise.

    Attributes:
        kind: name, as JAX gives it.
        target_config: file in this folder, for compiling without the GPU; None where there is none.
        memory: bytes.
        copy_bytes: bytes/s that a copy reads and writes together.
        link_bytes: bytes/s into one GPU of an all-gather over the GPUs of a host.
        index_seconds: of choosing one index and building the kernels' work lists, on one GPU, for
            each query head and key.
        lists_seconds: of building the work lists alone, where an index is given beforehand.
        backend: of whose kernels the rates are.
        forward_share, backward_share, matmul_share: of the rates of an H200 in
            `mtraining_jax/latency.py`: attention kernels forward and backward, and products.
        forecast: why its times are no more than a forecast; None for rates that were measured.
    """

    kind: str
    target_config: str | None
    memory: int
    copy_bytes: float
    link_bytes: float
    index_seconds: float
    lists_seconds: float
    backend: str = "mosaic_gpu"
    forward_share: float = 1.0
    backward_share: float = 1.0
    matmul_share: float = 1.0
    forecast: str | None = None


H200 = Gpu(
    kind="NVIDIA H200",
    target_config="h200.target_config.txtpb",
    # device_memory_size of the target config.
    memory=150_109_880_320,
    # Measured on one H200 with jax 0.11.2, CUDA 13.
    copy_bytes=4.27e12,
    # 8 H200 of one host, shards of 256 MiB.
    link_bytes=261 * 2**30,
    # docs/log/2026-11-20.md: 0.87 ms for 16 heads and 131072 keys, caps of 4096.
    index_seconds=0.87e-3 / (16 * 131072),
    # benchmarks/results/attention-h200-2026-11-22-whole.md: "build" at 131072 tokens.
    lists_seconds=0.20e-3 / (16 * 131072),
)

A100_40GB = Gpu(
    kind="NVIDIA A100-SXM4-40GB",
    target_config=None,
    # 39.59 GiB, as CUDA reports it.
    memory=42_505_000_000,
    # Of the data sheet's 1555 GB/s the share that an H200 reaches of its 4.8 TB/s.
    copy_bytes=1.38e12,
    # Likewise of 300 GB/s into a GPU, instead of 450.
    link_bytes=174 * 2**30,
    # By the ratio of the copies: choosing and building read and write.
    index_seconds=0.87e-3 / (16 * 131072) * 4.27 / 1.38,
    lists_seconds=0.20e-3 / (16 * 131072) * 4.27 / 1.38,
    # The Triton kernels at density 6.3 %: 155 and 105 TFLOP/s are hoped for, instead of 540 and
    # 443. They would be half of the data sheet's 312, and a third.
    forward_share=155 / 540,
    backward_share=105 / 443,
    # Of the data sheets' rates, 312 and 989.4.
    matmul_share=312 / 989.4,
    backend="triton",
    forecast="no A100 was at hand; its kernels have run on an H200 only",
)

GPUS = {"h200": H200, "a100-40gb": A100_40GB}
