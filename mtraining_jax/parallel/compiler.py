"""XLA compiler options that overlap ring attention's transfers with compute."""

from typing import Any

# By default XLA runs one collective at a time. A transfer between nodes could then overlap only one
# kernel, because the next hop inside the node waits for it. A limit of 4 leaves room for both, and
# for the all-reduce of the columns.
_GPU_OPTIONS = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}

# XLA counts offloaded arrays as memory of the GPU. Above its limit it would compute products again,
# those of the output layer three times, and need as much memory (Llama-3.1-8B, 4194304 tokens).
_OFFLOAD_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}


def ring_compiler_options(platform: str, offloads: bool = False) -> dict[str, Any]:
    """Returns the compiler options of a program with ring attention; results are the same.

    `offloads` says that it keeps most activations in host memory.
    """
    if platform != "gpu":
        return {}
    return _GPU_OPTIONS | (_OFFLOAD_OPTIONS if offloads else {})
