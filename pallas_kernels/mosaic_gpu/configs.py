"""Tuned tile configurations of the Hopper kernels, as data."""

import dataclasses

from pallas_kernels.mosaic_gpu.backward_keys import KeysConfig
from pallas_kernels.mosaic_gpu.backward_rows import RowsConfig
from pallas_kernels.mosaic_gpu.backward_step import BackwardConfig
from pallas_kernels.mosaic_gpu.forward import ForwardConfig


@dataclasses.dataclass(frozen=True)
class Configs:
    """One configuration for each kernel.

    With `fused` all gradients may come from one kernel: see `backend.fused_config`.
    """

    forward: ForwardConfig
    rows: RowsConfig
    keys: KeysConfig
    fused: BackwardConfig | None = None


# By head dim; measured on an H200. The fused backward kernel is for dense tiles alone. Medians of
# 10 on one H200, 2026-11-21, S = 131072, ms, against the two kernels:
#   dense, head dim 64: 163.0 against 193.6 (14 query heads, 2 key/value heads)
#   dense, head dim 128: 353.5 against 375.9 (16 query heads, 2 key/value heads)
#   mask B, head dim 128: 36.2 against 34.5 for the sum of the two (medians of 7)
CONFIGS = {
    64: Configs(
        ForwardConfig(keys_late=True), RowsConfig(), KeysConfig(),
        BackwardConfig(ds_from_memory=False, retire_dk=True, item_heads=1, waves=True),
    ),
    128: Configs(
        ForwardConfig(), RowsConfig(), KeysConfig(),
        BackwardConfig(early_shift=True, item_heads=1, waves=True),
    ),
}


def configs_for(head_dim: int) -> Configs:
    """The tuned configuration for a head dim (64 or 128)."""
    return CONFIGS[head_dim]
