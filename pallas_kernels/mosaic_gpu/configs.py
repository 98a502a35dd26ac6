"""Tuned tile configurations of the Hopper kernels, as data."""

import dataclasses

from pallas_kernels.mosaic_gpu.common import Config
from pallas_kernels.mosaic_gpu.fused_backward.steps import FusedConfig
from pallas_kernels.mosaic_gpu.kernels.dkdv import KeysConfig
from pallas_kernels.mosaic_gpu.kernels.forward import ForwardConfig


@dataclasses.dataclass(frozen=True)
class Configs:
    """One configuration per kernel; `MosaicGpu` decides when the fused backward kernel runs."""

    forward: ForwardConfig
    dq: Config
    dkdv: KeysConfig
    fused: FusedConfig | None = None
    fused_sparse_bytes: int = 0


# By head dim; measured on an H200, 2026-11-22, S = 131072. Whole backward passes by one kernel
# against two, in ms, medians of three rounds in one run (docs/design/backward-kernels.md):
#   head dim 64, 14 query heads, 2 key/value heads: mask A 7.15 against 7.06, B 16.8 against 19.1
#   head dim 128, 16 query heads, 2 key/value heads: A 14.2 against 13.1, B 37.0 against 37.0;
#   in an earlier run dense 311 against 369
CONFIGS = {
    64: Configs(
        ForwardConfig(keys_late=True),
        Config(),
        KeysConfig(stages=3, paired=True),
        FusedConfig(ds_from_memory=False, retire_dk=True, item_heads=1, waves=True),
        fused_sparse_bytes=2**31,
    ),
    128: Configs(
        ForwardConfig(),
        Config(),
        KeysConfig(stages=3),
        FusedConfig(early_shift=True, item_heads=1, waves=True),
    ),
    192: Configs(ForwardConfig(keys=64), Config(keys=64), KeysConfig(stages=3)),
    256: Configs(
        ForwardConfig(keys=64, query_slots=1), Config(keys=64, value_stages=1), KeysConfig()
    ),
}
