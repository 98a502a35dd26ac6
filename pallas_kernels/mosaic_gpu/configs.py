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


# By head dim; measured on an H200, 2026-11-22, S = 131072: the fused backward kernel against the
# two others, whole backward passes in ms (benchmarks/results/attention-h200-2026-11-22.md):
#   head dim 64, 14 query heads, 2 key/value heads: mask A 6.3 against 6.6, B 16.4 against 18.4
#   head dim 128, 16 query heads, 2 key/value heads: dense 311 against 369, A 11.8 against 12.9,
#   B 33.3 against 35.8
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
