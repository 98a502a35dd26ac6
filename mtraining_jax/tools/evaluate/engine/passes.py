"""Forward passes of the training layers: scores of labels, and the prefill of a prompt."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.models.fsdp import gather_weight
from mtraining_jax.models.label_scores import LabelScores, label_scores
from mtraining_jax.models.products import dot32
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import ACTIVATIONS, SEQUENCE_AXES
from mtraining_jax.parallel.ordering import serialize_collectives
from mtraining_jax.tools.evaluate.engine.network import Network

# Keys and values of a prompt, [L, B, S, Hk, D].
STACKED = P(None, None, SEQUENCE_AXES)


class Prompt(NamedTuple):
    """The result of the prefill."""

    logits: Array  # fp32 [B, V], for the first new token
    keys: Array  # [L, B, S, Hk, D], S in layout order and sharded over the ranks
    values: Array
    density: Array  # fp32, mean over layers


def joined(prompts: Sequence[Prompt]) -> Prompt:
    """Joins the results of prompts of one padded length, which are deleted, as one of B rows."""
    if len(prompts) == 1:
        return prompts[0]
    whole = _joined(tuple(prompts))
    for prompt in prompts:
        prompt.keys.delete()
        prompt.values.delete()
    return whole


@jax.jit
def _joined(prompts: tuple[Prompt, ...]) -> Prompt:
    logits, keys, values, density = zip(*prompts, strict=True)
    keys, values = (jnp.concatenate(x, axis=1) for x in (keys, values))
    return Prompt(jnp.concatenate(logits), keys, values, jnp.stack(density))


def make_score(network: Network, layout: Layout, length: int) -> Any:
    """Builds a program of labels, int32 [B, S], and of the last arguments of `Network.forward`.

    It returns replicated scores [B, S] in the same order, and the mean density over layers.
    """

    def score(labels: Array, *inputs: Any) -> tuple[LabelScores, Array]:
        model, hidden, statistics = network.forward(layout, length, *inputs)
        scores = label_scores(
            hidden,
            model.lm_head_weight(),
            labels,
            chunk_size=network.loss_chunk_size,
            mesh=network.mesh,
            weight_spec=network.lm_head_spec,
        )
        return scores, statistics["density"].mean()

    return network.jit(score, network.replicated)


def make_prefill(network: Network, layout: Layout, length: int) -> Any:
    """Builds the prefill, a program of the last arguments of `Network.forward`."""
    weight_spec = network.lm_head_spec

    def last_logits(hidden_BSE: Array, weight_VE: Array, prompt_len: Array) -> Array:
        slot = layout.local_positions(prompt_len - 1, lax.axis_index(SEQUENCE_AXES))
        row = lax.dynamic_index_in_dim(hidden_BSE, jnp.maximum(slot, 0), 1, keepdims=False)
        # Only one rank has the token; adding zeros in fp32 is exact.
        row = lax.psum(jnp.where(slot >= 0, row.astype(jnp.float32), 0), SEQUENCE_AXES)
        row = row.astype(hidden_BSE.dtype)
        weight_VE, (row,) = serialize_collectives(weight_VE, (row,))
        return dot32("be,ve->bv", row, gather_weight(weight_VE, weight_spec))

    def prefill(
        state: nnx.State, tokens: Array, positions: Array, inputs: AttentionInputs
    ) -> Prompt:
        model, hidden, statistics = network.forward(
            layout, length, state, tokens, positions, inputs, capture_kv=lambda k, v: (k, v)
        )
        keys, values = statistics["kv"]
        assert inputs.documents is not None  # see `Programs.inputs`
        logits = jax.shard_map(
            last_logits,
            mesh=network.mesh,
            in_specs=(ACTIVATIONS, weight_spec, P()),
            out_specs=P(),
            check_vma=False,
        )(hidden, model.lm_head_weight().astype(hidden.dtype), inputs.documents.tokens[0, 0])
        return Prompt(logits, keys, values, statistics["density"].mean())

    stacked = NamedSharding(network.mesh, STACKED)
    shardings = network.replicated, stacked, stacked, network.replicated
    return network.jit(prefill, Prompt(*cast(Any, shardings)))
