"""Memory sizes and rates of GPUs for the dry run, with their sources."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Rates of one GPU, measured unless noted."""

    kind: str
    memory: int  # bytes
    copy_bytes: float  # bytes/s of a copy, reads and writes together
    link_bytes: float  # bytes/s into one GPU in an all-gather over the GPUs of a host
    index_seconds: float  # of selection and building work lists, per query head and key
    lists_seconds: float  # the same without selection
    backend: str = "mosaic_gpu"
    target_config: str | None = None  # description in this folder, for compiling without the GPU
    # Rates relative to those of the H200 in `mtraining_jax/cost_model/kernel_times.py`.
    forward_share: float = 1.0
    backward_share: float = 1.0
    matmul_share: float = 1.0
    forecast: str | None = None  # why times are only a forecast; None if rates were measured


H200 = Gpu(
    kind="NVIDIA H200",
    target_config="h200.target_config.txtpb",
    memory=150_109_880_320,  # device_memory_size in the target description
    copy_bytes=4.27e12,  # measured on one H200 with jax 0.11.2, CUDA 13
    link_bytes=261 * 2**30,  # 8 H200 of one host, shards of 256 MiB
    # docs/design/exact-top-p.md: 0.87 ms for 16 heads and 131072 keys, caps of 4096.
    index_seconds=0.87e-3 / (16 * 131072),
    # benchmarks/results/attention-h200-2026-11-22-whole.md: "build" at 131072 tokens.
    lists_seconds=0.20e-3 / (16 * 131072),
)

H100 = dataclasses.replace(
    H200,
    kind="NVIDIA H100 80GB HBM3",
    target_config=None,
    memory=85_520_809_984,  # 79.65 GiB
    # The same chip; data sheets: 3.35 TB/s of memory instead of 4.8.
    copy_bytes=4.27e12 * 3.35 / 4.8,
    forecast="kernel rates are those of an H200, which is the same chip with faster memory",
)

A100_40GB = Gpu(
    kind="NVIDIA A100-SXM4-40GB",
    memory=42_505_000_000,  # 39.59 GiB as reported by CUDA
    # Data sheet: 1555 GB/s, times the fraction that an H200 reaches of its 4.8 TB/s.
    copy_bytes=1.38e12,
    # Data sheet: 300 GB/s into a GPU, scaled in the same way (H200: 450).
    link_bytes=174 * 2**30,
    # Scaled by copy bandwidth.
    index_seconds=0.87e-3 / (16 * 131072) * 4.27 / 1.38,
    lists_seconds=0.20e-3 / (16 * 131072) * 4.27 / 1.38,
    # Assumed for the Triton kernels at density 6.3 %: 155 and 105 TFLOP/s, a half and a third of
    # the data sheet's 312, instead of 540 and 443.
    forward_share=155 / 540,
    backward_share=105 / 443,
    matmul_share=312 / 989.4,  # data sheets, TFLOP/s
    backend="triton",
    forecast="the kernels have not run on an A100, only on an H200",
)

GPUS = {"h200": H200, "h100": H100, "a100-40gb": A100_40GB}
