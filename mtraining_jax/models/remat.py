"""What the backward pass finds kept, and what it computes again.

Of each layer:
- "none": everything is kept.
- "attention": its input and, by name, attention's output, log-sum-exp and sparse index are kept.
  Attention and the choice of its index do not run again; norms and all projections but the last
  of the MLP do.
- "attention_offload": the same, with the input kept in the host's pinned memory.
- "full": its input is kept; all of the rest is computed again.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_policies

from mtraining_jax.parallel.ring import SAVED_NAMES

# The name of a layer's input.
RESIDUAL = "residual"


def rematerialised(layer: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """`layer`, the body of a scan, so that its backward pass keeps what `kind` says."""
    if kind == "none":
        return layer
    policies = {
        "full": checkpoint_policies.nothing_saveable,
        "attention": checkpoint_policies.save_only_these_names(*SAVED_NAMES),
        "attention_offload": checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(SAVED_NAMES),
            names_which_can_be_offloaded=[RESIDUAL],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }
    # Inside a scan the compiler cannot merge the recomputation with the forward pass.
    return jax.checkpoint(layer, policy=policies[kind], prevent_cse=False)
