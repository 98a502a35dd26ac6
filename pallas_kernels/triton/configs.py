"""Tile configurations of the Triton kernels, as data: nothing is tuned while a program runs.

Processes that each measured by their own clock could choose different ones, and get other bits.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """Of one kernel.

    Attributes:
        rows: queries of a tile.
        keys: of a tile.
        warps: of a thread block.
        stages: tiles in flight.
    """

    rows: int
    keys: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Configs:
    """One configuration for each kernel; that for dk and dv serves blocks and columns.

    Attributes:
        forward, dq, dkdv: of the kernels.
        forward_documents: of the forward kernel with packed documents, whose comparisons take
            registers; None for that without them.
    """

    forward: Config
    dq: Config
    dkdv: Config
    forward_documents: Config | None = None


# By head dim. For 128 the fastest of those that benchmarks/tune_triton.py timed with the code of an
# A100 on an H200, as no A100 was at hand (benchmarks/results/tune-triton-h200-2026-11-23.md), among
# those that spill nearly nothing. With packed documents the fastest forward kernel spills 156
# bytes, and another one runs. For 64, and for documents, chosen from what the compiler reports for
# sm_80 and not yet by time: no spills, copies that run two tiles ahead. Tests in
# tests/pallas_kernels/test_triton_compiled.py hold that none spills.
AMPERE = {
    64: Configs(
        Config(128, 64, 4, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 3),
        forward_documents=Config(128, 64, 8, 3),
    ),
    128: Configs(
        Config(128, 32, 4, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 2),
        forward_documents=Config(128, 64, 8, 3),
    ),
}  # fmt: skip
# An A100 gives a thread block 163 KiB of shared memory. GPUs of compute capability 8.6 and 8.9 give
# 99, too little for that dq, and their code of that forward kernel spills 60 bytes.
LESS_MEMORY = {
    64: AMPERE[64],
    128: Configs(Config(128, 64, 8, 3), Config(64, 32, 4, 3), Config(64, 64, 4, 2)),
}
_WITH_LESS_MEMORY = 86, 89
# For Hopper GPUs, where these kernels run if asked for by name. For 128 the fastest of those timed
# there; for 64 by what the compiler reports.
HOPPER = {
    64: Configs(Config(128, 128, 8, 3), Config(128, 64, 8, 3), Config(64, 128, 8, 3)),
    128: Configs(Config(128, 128, 8, 3), Config(128, 64, 8, 3), Config(64, 128, 8, 3)),
}


def table_for(capability: int) -> dict[int, Configs]:
    """The configurations by head dim for a compute capability, as 80 for 8.0."""
    if capability in _WITH_LESS_MEMORY:
        return LESS_MEMORY
    return AMPERE if capability < 90 else HOPPER


def configs_for(capability: int, head_dim: int) -> Configs:
    """The configurations for a compute capability, as 80 for 8.0, and a head dim (64 or 128)."""
    return table_for(capability)[head_dim]
