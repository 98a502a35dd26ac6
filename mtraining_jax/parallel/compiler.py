"""XLA compiler options that overlap ring attention's transfers with compute."""

# By default XLA runs one collective at a time. A transfer between nodes could then overlap only one
# kernel, because the next hop inside the node waits for it. A limit of 4 leaves room for both, and
# for the all-reduce of the columns.
_GPU_OPTIONS = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}


def ring_compiler_options(platform: str) -> dict[str, int]:
    """Returns the compiler options of a program with ring attention; results are the same."""
    return dict(_GPU_OPTIONS) if platform == "gpu" else {}
