"""Tuned tile configurations of the Hopper kernels, as data."""

import dataclasses

from pallas_kernels.mosaic_gpu.backward_keys import KeysConfig
from pallas_kernels.mosaic_gpu.backward_rows import RowsConfig
from pallas_kernels.mosaic_gpu.forward import ForwardConfig


@dataclasses.dataclass(frozen=True)
class Configs:
    """One configuration for each kernel."""

    forward: ForwardConfig
    rows: RowsConfig
    keys: KeysConfig


# By head dim; measured on an H200.
CONFIGS = {
    64: Configs(ForwardConfig(), RowsConfig(), KeysConfig()),
    128: Configs(ForwardConfig(), RowsConfig(), KeysConfig()),
}


def configs_for(head_dim: int) -> Configs:
    """The tuned configuration for a head dim (64 or 128)."""
    return CONFIGS[head_dim]
