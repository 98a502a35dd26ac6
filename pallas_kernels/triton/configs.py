"""Tile configurations of the Triton kernels: data, since tuning at run time could change bits."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int  # queries per tile
    keys: int  # keys per tile
    warps: int  # per thread block
    stages: int  # tiles in flight


@dataclasses.dataclass(frozen=True)
class Configs:
    """One configuration per kernel; the one for dk and dv is used for blocks and columns."""

    forward: Config
    dq: Config
    dkdv: Config
    forward_documents: Config | None = None  # packed documents: comparisons need registers


# By head dim. For 128 the fastest of those that benchmarks.kernels.tune timed with A100 code on an
# H200, as no A100 was available (benchmarks/results/tune-triton-h200-2026-11-23.md), among
# those with almost no spills. With packed documents the fastest forward kernel spills 156 bytes, so
# another one is used. For 64, and for documents, selected by what the compiler reports for sm_80
# and not yet timed: no spills, copies that run two tiles ahead.
# tests/pallas_kernels/triton/test_triton_compiled.py checks that none spills.
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
# An A100 gives a thread block 163 KiB of shared memory. GPUs of compute capability 8.6, 8.9 and
# 12.x give 99, too little for that dq configuration, and that forward kernel spills there.
LESS_MEMORY = {
    64: AMPERE[64],
    128: Configs(Config(128, 64, 8, 3), Config(64, 32, 4, 3), Config(64, 64, 4, 2)),
}
_WITH_LESS_MEMORY = 86, 89, 120, 121
# For Hopper GPUs, where these kernels run if requested by name. For 128 the fastest of those timed
# there; for 64 by what the compiler reports.
HOPPER = {
    64: Configs(Config(128, 128, 8, 3), Config(128, 64, 8, 3), Config(64, 128, 8, 3)),
    128: Configs(Config(128, 128, 8, 3), Config(128, 64, 8, 3), Config(64, 128, 8, 3)),
}
# For Blackwell GPUs of data centers, where none of these kernels has run; by what the compiler
# reports. The forward kernel for Hopper GPUs needs more than the 227 KiB of a thread block there.
BLACKWELL = {64: HOPPER[64], 128: dataclasses.replace(HOPPER[128], forward=Config(128, 64, 8, 3))}


def table_for(capability: int) -> dict[int, Configs]:
    """Returns the configurations by head dim for a compute capability, such as 80 for 8.0."""
    if capability in _WITH_LESS_MEMORY:
        return LESS_MEMORY
    if capability >= 100:
        return BLACKWELL
    return AMPERE if capability < 90 else HOPPER
