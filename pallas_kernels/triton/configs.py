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
    """One configuration for each kernel; that for dk and dv serves blocks and columns."""

    forward: Config
    dq: Config
    dkdv: Config


# By head dim. Chosen from what the compiler reports for sm_80, not yet from times on a GPU: no
# spills, copies that run two tiles ahead (with two stages a thread block waits for each copy), and
# shared memory and registers of which a multiprocessor of an A100 holds two thread blocks, but for
# the widest. tests/pallas_kernels/test_triton_compiled.py holds that they stay so.
AMPERE = {
    64: Configs(Config(128, 64, 4, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 3)),
    128: Configs(Config(128, 64, 8, 3), Config(64, 32, 4, 3), Config(32, 64, 4, 3)),
}
# For Hopper GPUs, where these kernels run if asked for by name; chosen in the same way, for sm_90.
HOPPER = {
    64: Configs(Config(128, 128, 8, 3), Config(128, 64, 8, 3), Config(64, 128, 8, 3)),
    128: Configs(Config(128, 128, 8, 3), Config(128, 64, 8, 3), Config(64, 128, 8, 3)),
}


def configs_for(capability: int, head_dim: int) -> Configs:
    """The configurations for a compute capability, as 80 for 8.0, and a head dim (64 or 128)."""
    return (AMPERE if capability < 90 else HOPPER)[head_dim]
