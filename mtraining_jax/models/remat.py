"""What is kept for the backward pass, and what it computes again.

Of each layer:
- "none": everything is kept.
- "mlp": its input, queries, keys, values, attention's output, log-sum-exp and sparse index, and
  the residual stream after attention are kept. Norms and the first two products of the MLP run
  again, except for the first `mlp_kept_chunks` chunks of tokens.
- "attention": as "mlp" without queries, keys, values and the stream after attention. All products
  of the layer but the last of the MLP run again; attention and the choice of its index do not.
- "attention_offload": as "attention", with the layer's input kept in the host's pinned memory.
- "full": its input is kept; everything else runs again.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_policies

from mtraining_jax.models.swiglu import MLP_PRODUCTS
from pallas_kernels.names import SAVED_NAMES

# Names of what a layer may keep, in addition to attention's: its input; queries, keys and values;
# the residual stream between attention and the MLP.
RESIDUAL, HEADS, MIDDLE = "residual", "heads", "middle"


def rematerialised(layer: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """`layer`, the body of a scan, so that its backward pass keeps what `kind` says."""
    if kind == "none":
        return layer
    policies = {
        "full": checkpoint_policies.nothing_saveable,
        "attention": checkpoint_policies.save_only_these_names(*SAVED_NAMES),
        "mlp": checkpoint_policies.save_only_these_names(
            *SAVED_NAMES, HEADS, MIDDLE, MLP_PRODUCTS
        ),
        "attention_offload": checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(SAVED_NAMES),
            names_which_can_be_offloaded=[RESIDUAL],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }
    # Inside a scan the compiler cannot merge the recomputation with the forward pass.
    return jax.checkpoint(layer, policy=policies[kind], prevent_cse=False)
