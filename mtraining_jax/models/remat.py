"""Rematerialization policies: what a layer saves for the backward pass.

- "none": saves everything.
- "mlp": saves the layer input, queries, keys, values, attention output, log-sum-exp, sparse index,
  and the residual stream after attention. Recomputes norms and the first two products of the MLP,
  except for the first `mlp_kept_chunks` chunks of tokens.
- "attention": like "mlp" without queries, keys, values and the stream after attention. Recomputes
  all products except the last one of the MLP; attention and index selection are not recomputed.
- "attention_offload": like "attention", with the layer input in pinned host memory.
- "full_offload": like it, with the attention output and the sparse index there as well.
- "full": saves the layer input; recomputes everything else.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_policies

from mtraining_jax.models.swiglu import MLP_PRODUCTS
from pallas_kernels.names import INDEX, LSE, OUTPUT, SAVED_NAMES

# Names of saved values, in addition to attention's.
RESIDUAL, QKV, POST_ATTENTION = "residual", "heads", "middle"
_SAVED_BY_MLP = QKV, POST_ATTENTION, MLP_PRODUCTS


def remat(layer: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """Wraps `layer`, the body of a scan, so that it saves what the policy `kind` says."""
    if kind == "none":
        return layer
    policies = {
        "full": checkpoint_policies.nothing_saveable,
        "attention": checkpoint_policies.save_only_these_names(*SAVED_NAMES),
        "mlp": checkpoint_policies.save_only_these_names(*SAVED_NAMES, *_SAVED_BY_MLP),
        "attention_offload": _offloading([RESIDUAL], SAVED_NAMES),
        "full_offload": _offloading([RESIDUAL, OUTPUT, INDEX], [LSE]),
    }
    # Inside a scan the compiler cannot merge the recomputation with the forward pass.
    return jax.checkpoint(layer, policy=policies[kind], prevent_cse=False)


def _offloading(offloaded: Sequence[str], saved: Sequence[str]) -> Any:
    return checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )
