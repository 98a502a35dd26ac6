"""Compiler options with which XLA hides a ring's transfers."""

# By default XLA runs one collective at a time. A transfer between nodes would then hide behind one
# kernel only, as the next hop inside the node waits for it; 4 leaves room for both, and for the
# sum of the columns.
_GPU_OPTIONS = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}


def ring_compiler_options(platform: str) -> dict[str, int]:
    """Options with which to compile a program that holds ring attention.

    Args:
        platform: of the devices that it will run on, as in `jax.Device.platform`.

    Returns:
        For `jax.jit(..., compiler_options=...)`; empty where none are needed. Without them the
        results are the same, but a hierarchical ring waits for its transfers between nodes.
    """
    return dict(_GPU_OPTIONS) if platform == "gpu" else {}
