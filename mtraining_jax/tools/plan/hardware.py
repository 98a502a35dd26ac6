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
    # Bytes/s to and from the host that add to a step, as little of them is hidden: 9 GiB each way
    # added 0.28 s (benchmarks/results/archive-step.md, 3.56 s instead of 3.28).
    offload_bytes: float = 69e9
    backend: str = "mosaic_gpu"
    # Description in this folder of a GPU for compiling without it, and what differs from it.
    target_config: str | None = None
    target_changes: tuple[tuple[str, str], ...] = ()
    # Rates relative to those of the H200 in `mtraining_jax/tools/plan/kernel_times.py`.
    forward_share: float = 1.0
    backward_share: float = 1.0
    scores_share: float = 1.0  # of the exponentials in index selection
    matmul_share: float = 1.0
    forecast: str | None = None  # why times are only a forecast; None if rates were measured


H200 = Gpu(
    kind="NVIDIA H200",
    target_config="h200.target_config.txtpb",
    memory=150_109_880_320,  # device_memory_size in the target description
    copy_bytes=4.27e12,  # measured on one H200 with jax 0.11.2, CUDA 13
    link_bytes=261 * 2**30,  # 8 H200 of one host, shards of 256 MiB
    # docs/design/selection.md: 0.87 ms for 16 heads and 131072 keys, caps of 4096.
    index_seconds=0.87e-3 / (16 * 131072),
    # benchmarks/results/attention-h200-2026-11-22-whole.md: "build" at 131072 tokens.
    lists_seconds=0.20e-3 / (16 * 131072),
)

H100 = dataclasses.replace(
    H200,
    kind="NVIDIA H100 80GB HBM3",
    memory=85_520_809_984,  # 79.65 GiB
    # Of XLA's xla/backends/gpu/target_config/specs/h100_sxm.txtpb, but for the size.
    target_changes=(
        ("memory_bandwidth", "3352320000000"),
        ("l2_cache_size", "52428800"),
        ("device_memory_size", "85520809984"),
        ("mem_clock_ghz", "2.619"),
        ("name", '"NVIDIA H100 80GB HBM3"'),
        ("device_description_str", '"NVIDIA H100 80GB HBM3"'),
    ),
    # Derived: the same chip; data sheets: 3.35 TB/s of memory instead of 4.8.
    copy_bytes=4.27e12 * 3.35 / 4.8,
    # Measured on one H100, benchmarks/results/before-after-h100-2026-11-25.md: dense, lists and
    # mask B forward at 1.06, 1.05 and 1.02 of the H200's rates, backward at 1.04, 1.09 and 1.03.
    forward_share=1.05,
    backward_share=1.05,
    # Fitted to steps of one H100: 1.44 and 1.63 s for Qwen2.5-0.5B with replayed pairs and lists
    # (the same file; 1.42 and 1.52 s are predicted), 6.84 s for Qwen2.5-3B with attention_offload
    # (7.02 s). Norms and gates wait for memory.
    matmul_share=0.97,
    forecast="attention was measured on one H100, matrix products only in three entire steps; "
    "memory and links are those of an H200, times 3.35 / 4.8 TB/s for memory",
)

A100_40GB = Gpu(
    kind="NVIDIA A100-SXM4-40GB",
    memory=42_505_000_000,  # 39.59 GiB as reported by CUDA
    # Data sheet: 1555 GB/s, times the fraction that an H200 reaches of its 4.8 TB/s.
    copy_bytes=1.38e12,
    # Data sheet: 300 GB/s into a GPU, scaled in the same way (H200: 450).
    link_bytes=174 * 2**30,
    offload_bytes=69e9 / 2,  # PCIe 4 instead of 5
    # Scaled by copy bandwidth.
    index_seconds=0.87e-3 / (16 * 131072) * 4.27 / 1.38,
    lists_seconds=0.20e-3 / (16 * 131072) * 4.27 / 1.38,
    # Assumed for the Triton kernels at density 6.3 %: 155 and 105 TFLOP/s, a half and a third of
    # the data sheet's 312, instead of 540 and 443.
    forward_share=155 / 540,
    backward_share=105 / 443,
    scores_share=155 / 540,
    matmul_share=312 / 989.4,  # data sheets, TFLOP/s
    backend="triton",
    forecast="the kernels have not run on an A100, only on an H200",
)

# Forecasts from published peaks: every rate of a measured GPU, scaled by one of its peaks.
A100_80GB = dataclasses.replace(
    A100_40GB,
    kind="NVIDIA A100-SXM4-80GB",
    memory=85_100_068_864,  # XLA's a100_sxm_80.txtpb
    copy_bytes=4.27e12 * 2.039 / 4.8,  # data sheet, TB/s
)

# Data sheet: 96 GB, 4.0 TB/s, 148 TFLOP/s, NVLink as in an H200; 78 of its 132 SMs.
H20 = dataclasses.replace(
    H200,
    kind="NVIDIA H20",
    target_config=None,
    memory=102_625_181_696,  # 97871 MiB as reported by nvidia-smi
    copy_bytes=4.27e12 * 4.0 / 4.8,
    index_seconds=H200.index_seconds * 132 / 78,
    lists_seconds=H200.lists_seconds * 132 / 78,
    forward_share=148 / 989.4,
    backward_share=148 / 989.4,
    scores_share=78 / 132,
    matmul_share=148 / 989.4,
    forecast="an H200's rates, times 148 / 989 TFLOP/s, 4.0 / 4.8 TB/s and 78 / 132 SMs",
)

# Data sheet of HGX B200: 8 TB/s, 2250 TFLOP/s, NVLink of twice the rate; memory, 148 SMs and
# 1.965 GHz: XLA's b200.txtpb. No kernel is written for it: Triton's of the A100 (108 SMs, 1.41 GHz)
# use the instructions of the A100.
_B200_CLOCKS = 148 * 1.965 / (108 * 1.41)
B200 = dataclasses.replace(
    A100_40GB,
    kind="NVIDIA B200",
    memory=191_514_411_008,
    copy_bytes=4.27e12 * 8.0 / 4.8,
    link_bytes=2 * H200.link_bytes,
    index_seconds=H200.index_seconds * 4.8 / 8.0,
    lists_seconds=H200.lists_seconds * 4.8 / 8.0,
    offload_bytes=69e9,
    forward_share=A100_40GB.forward_share * _B200_CLOCKS,
    backward_share=A100_40GB.backward_share * _B200_CLOCKS,
    scores_share=A100_40GB.scores_share * _B200_CLOCKS,
    matmul_share=2250 / 989.4,
    forecast='Triton kernels (parallel.backend = "triton", extra triton) have not run on a B200: '
    "an A100's assumed rates by SMs and clock, matrix products by 2250 / 989 TFLOP/s of an H200",
)

GPUS = {
    "h200": H200,
    "h100-80gb": H100,
    "a100-80gb": A100_80GB,
    "a100-40gb": A100_40GB,
    "h20": H20,
    "b200": B200,
}
