"""Scans over layers, and rematerialization policies: what a layer saves for the backward pass.

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

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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


def scan_kinds(
    layers: Mapping[Any, Callable[..., Any]], kinds: tuple[Any, ...], x: Any, inputs: Any
) -> tuple[Any, dict[str, Any]]:
    """Scans layers of several kinds, each with its slice of `inputs` [L, ...].

    Repeats of the same kinds are one program. Returns the last x and the statistics [L, ...] by
    name; NaN, or 0 for integers, for layers without them.
    """

    def runs(x: Any, inputs: Any, kinds: tuple[Any, ...]) -> tuple[Any, dict[str, Any]]:
        parts, start = [], 0
        for kind, members in itertools.groupby(kinds):
            stop = start + len(list(members))
            run_inputs = jax.tree.map(lambda x, part=slice(start, stop): x[part], inputs)
            x, statistics = jax.lax.scan(layers[kind], x, run_inputs)
            parts.append((stop - start, statistics))
            start = stop
        return x, _joined(parts)

    count = len(kinds)
    period = next(n for n in range(1, count + 1) if kinds[n:] == kinds[:-n])
    if period in (1, count):
        return runs(x, inputs, kinds)
    repeated = count // period * period

    def repeats(x: Any, inputs: Any) -> tuple[Any, dict[str, Any]]:
        return runs(x, inputs, kinds[:period])

    first = jax.tree.map(lambda x: x[:repeated].reshape(-1, period, *x.shape[1:]), inputs)
    x, statistics = jax.lax.scan(repeats, x, first)
    parts = [(repeated, jax.tree.map(lambda x: x.reshape(repeated, *x.shape[2:]), statistics))]
    if repeated < count:
        x, statistics = runs(x, jax.tree.map(lambda x: x[repeated:], inputs), kinds[repeated:])
        parts.append((count - repeated, statistics))
    return x, _joined(parts)


def _joined(parts: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Joins the statistics of numbers of layers."""
    if len(parts) == 1:
        return parts[0][1]
    examples = {name: x for _, statistics in parts for name, x in statistics.items()}

    def without(count: int, example: jax.Array) -> jax.Array:
        fill = jnp.nan if jnp.issubdtype(example.dtype, jnp.floating) else 0
        return jnp.full((count, *example.shape[1:]), fill, example.dtype)

    def column(name: str) -> Any:
        columns = (
            of[name] if name in of else jax.tree.map(lambda x, n=n: without(n, x), examples[name])
            for n, of in parts
        )
        return jax.tree.map(lambda *x: jnp.concatenate(x), *columns)

    return {name: column(name) for name in examples}


def _offloading(offloaded: Sequence[str], saved: Sequence[str]) -> Any:
    return checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )
