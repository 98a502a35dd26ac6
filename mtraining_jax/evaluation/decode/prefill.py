"""Prefill: the forward pass of training, which also returns keys and values."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.evaluation.decode.cache import STACKED
from mtraining_jax.evaluation.engine.network import Network
from mtraining_jax.models.fsdp import gather_weight
from mtraining_jax.models.sharding import lm_head_spec
from mtraining_jax.parallel.compiler import ring_compiler_options
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import ACTIVATIONS, SEQUENCE_AXES
from mtraining_jax.parallel.ordering import serialize_collectives
from mtraining_jax.patterns import Pattern


class Prompt(NamedTuple):
    """The result of the prefill.

    Attributes:
        logits: fp32 [B, V], for the first new token.
        keys, values: [L, B, S, Hk, D], S in layout order and sharded over the ranks.
        density: fp32, computed over causal pairs of the padded prompt, mean over layers.
    """

    logits: Array
    keys: Array
    values: Array
    density: Array


def make_prefill(
    network: Network, layout: Layout, pattern: Pattern, length: int
) -> Callable[..., Prompt]:
    """Builds the prefill program.

    Args:
        layout: layout of the padded prompt.
        length: length that RoPE assumes for the full sequence (`Network.length_like`).

    Returns:
        A jitted function of the state, int32 [B, S] tokens and positions in layout order, the
        int32 scalar prompt_len, and the pattern's `layer_inputs`.
    """
    mesh = network.mesh

    def prefill(
        state: nnx.State, tokens: Array, positions: Array, prompt_len: Array, inputs: Any
    ) -> Prompt:
        model = nnx.merge(network.graphdef, state)
        hidden, statistics, (keys, values) = model.forward(
            tokens,
            positions,
            network.attention(layout, pattern, prompt_len),
            capture_kv=lambda k, v: (k, v),
            attention_inputs=inputs,
            mesh=mesh,
            fsdp=network.fsdp,
            length=length,
        )
        weight = model.lm_head_weight().astype(hidden.dtype)
        logits = _last_logits(network, layout, hidden, weight, prompt_len)
        return Prompt(logits, keys, values, statistics["density"].mean())

    everywhere, stacked = NamedSharding(mesh, P()), NamedSharding(mesh, STACKED)
    return jax.jit(
        prefill,
        out_shardings=Prompt(*cast(Any, (everywhere, stacked, stacked, everywhere))),
        compiler_options=ring_compiler_options(mesh.devices.flat[0].platform),
    )


def _last_logits(
    network: Network, layout: Layout, hidden_BSE: Array, weight_VE: Array, prompt_len: Array
) -> Array:
    weight_spec = lm_head_spec(network.spec, network.mesh, network.fsdp)

    def logits_of_shard(hidden_BSE: Array, weight_VE: Array, prompt_len: Array) -> Array:
        slot = layout.local_positions(prompt_len - 1, lax.axis_index(SEQUENCE_AXES))
        row = lax.dynamic_index_in_dim(hidden_BSE, jnp.maximum(slot, 0), 1, keepdims=False)
        # Only one rank has the token; adding zeros in fp32 is exact.
        row = lax.psum(jnp.where(slot >= 0, row.astype(jnp.float32), 0), SEQUENCE_AXES)
        row = row.astype(hidden_BSE.dtype)
        weight_VE, (row,) = serialize_collectives(weight_VE, (row,))
        return token_logits(row, gather_weight(weight_VE, weight_spec))

    return jax.shard_map(
        logits_of_shard,
        mesh=network.mesh,
        in_specs=(ACTIVATIONS, weight_spec, P()),
        out_specs=P(),
        check_vma=False,
    )(hidden_BSE, weight_VE, prompt_len)


def token_logits(hidden_BE: Array, weight_VE: Array) -> Array:
    """Applies the output layer to one token per sequence, in its dtype: fp32 [B, V]."""
    exact = lax.Precision.HIGHEST if hidden_BE.dtype == jnp.float32 else None
    return jnp.einsum(
        "be,ve->bv", hidden_BE, weight_VE, precision=exact, preferred_element_type=jnp.float32
    )
