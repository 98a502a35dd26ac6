"""Tuned tile configurations of the Hopper kernels, as data."""

import dataclasses

from pallas_kernels.mosaic_gpu.backward_keys import KeysConfig
from pallas_kernels.mosaic_gpu.backward_rows import RowsConfig
from pallas_kernels.mosaic_gpu.backward_step import BackwardConfig
from pallas_kernels.mosaic_gpu.forward import ForwardConfig


@dataclasses.dataclass(frozen=True)
class Configs:
    """One configuration for each kernel.

    With `fused`, gradients over diagonals come from one kernel: see `backend.backward`.
    """

    forward: ForwardConfig
    rows: RowsConfig
    keys: KeysConfig
    fused: BackwardConfig | None = None


# By head dim; measured on an H200.
CONFIGS = {
    64: Configs(ForwardConfig(), RowsConfig(), KeysConfig()),
    128: Configs(ForwardConfig(), RowsConfig(), KeysConfig()),
}

# The fused backward kernel by head dim, not in CONFIGS yet. Medians of 10 on one H200, 2026-11-21,
# S = 131072, dense causal, ms, against the two kernels of CONFIGS:
#   64: 163.0 against 193.6 (14 query heads, 2 key/value heads)
#   128: 353.5 against 375.9 (16 query heads, 2 key/value heads)
# The best for a sparse mask was slower than two kernels: 14.4 against 13.05 for mask A and 40.7
# against 35.6 for mask B at 128. Waves were not tried there.
FUSED = {
    64: BackwardConfig(ds_from_memory=False, retire_dk=True, split_heads=True, waves=True),
    128: BackwardConfig(stages=3, split_heads=True, waves=True),
}


def configs_for(head_dim: int) -> Configs:
    """The tuned configuration for a head dim (64 or 128)."""
    return CONFIGS[head_dim]
