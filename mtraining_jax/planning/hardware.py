"""Sizes and rates of the GPUs that a dry run estimates for, each with its source.

Those of attention and matrix products are in `mtraining_jax/latency.py`.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU, by measurement unless a line says otherwise.

    Attributes:
        kind: name, as JAX gives it.
        target_config: file in this folder, for compiling without the GPU.
        memory: bytes.
        copy_bytes: bytes/s that a copy reads and writes together.
        link_bytes: bytes/s into one GPU of an all-gather over the GPUs of a host.
        index_seconds: of choosing one index and building the kernels' work lists, on one GPU, for
            each query head and key.
    """

    kind: str
    target_config: str
    memory: int
    copy_bytes: float
    link_bytes: float
    index_seconds: float


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
)
