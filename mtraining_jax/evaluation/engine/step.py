"""One decoding step: appends a token to the cache and samples the next one."""

import dataclasses
import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.evaluation.engine.cache import Cache, attend_to_cache
from mtraining_jax.evaluation.engine.network import Network
from mtraining_jax.evaluation.engine.passes import token_logits
from mtraining_jax.evaluation.engine.sampling import next_token
from mtraining_jax.models.fsdp import compute_weights, gather_weight
from mtraining_jax.models.rope.rotary import rope_tables
from mtraining_jax.models.sharding import layer_specs, lm_head_spec, parameter_spec, state_shardings
from mtraining_jax.models.transformer import Transformer, graph_definition
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import SEQUENCE_AXES
from mtraining_jax.parallel.ordering import serialize_collectives


class Stepped(NamedTuple):
    """The cache with the token, the next token int32 [B], and its logits fp32 [B, V]."""

    cache: Cache
    token: Array
    logits: Array


def make_step(network: Network, layout: Layout, length: int, kind: str) -> Any:
    """Builds a program that reads one token and samples the next.

    Attention is dense. Every rank computes the full layer, but attends only to its own shard of the
    prompt; ranks exchange one output per head.

    Returns:
        A jitted function of the state, a `Cache` with room (donated), the token int32 [B] that
        follows those in the cache, and temperature, top_p and seed of `next_token`.
    """
    mesh, specs = network.mesh, Cache.specs(network.spec.num_layers)
    in_cache = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )

    def step(
        state: nnx.State, cache: Cache, token: Array, temperature: Array, top_p: Array, seed: Array
    ) -> Stepped:
        shardings = state_shardings(state, network.spec.parameters, mesh, network.fsdp)
        run = jax.shard_map(
            functools.partial(_step_on_shard, network, layout, length),
            mesh=mesh,
            in_specs=(jax.tree.map(lambda x: x.spec, shardings), specs, P()),
            out_specs=(specs, P()),
            check_vma=False,
        )
        cache, logits = run(state, cache, token)
        # The first token was sampled from the logits of the prompt.
        sampled = next_token(logits, kind, temperature, top_p, seed, cache.count)
        return Stepped(cache, sampled, logits)

    out_shardings = Stepped(in_cache, *cast(Any, (network.replicated, network.replicated)))
    return jax.jit(step, donate_argnums=1, out_shardings=out_shardings)


def _step_on_shard(
    network: Network, layout: Layout, length: int, state: nnx.State, cache: Cache, token_B: Array
) -> tuple[Cache, Array]:
    spec, mesh, fsdp = network.spec, network.mesh, network.fsdp
    dtype = jnp.dtype(spec.dtype)
    one_token = dataclasses.replace(spec, remat="none", mlp_kept_chunks=0)
    model: Transformer = nnx.merge(graph_definition(one_token), state)
    position = cache.prompt_len + cache.count
    cos, sin = rope_tables(position.reshape(1, 1), spec, length)
    place, seen = _places(layout, cache)
    embedding_spec = parameter_spec(spec.parameters["embed_tokens.weight"], mesh, fsdp)
    table_VE = gather_weight(model.embed_tokens.weight[...], embedding_spec)
    x_B1E = jnp.take(table_VE, token_B, axis=0).astype(dtype)[:, None]
    graphdef, layers = nnx.split(model.layers)
    specs = layer_specs(layers, spec.parameters, mesh, fsdp)
    filled: list[tuple[Array, Array]] = []
    # Unrolled: in a loop, the compiler copies each layer's weights and keys before it reads them.
    for number in range(spec.num_layers):
        parameters = jax.tree.map(lambda x, number=number: x[number], layers)
        parameters = compute_weights(parameters, dtype)
        parameters, (x_B1E,) = serialize_collectives(parameters, (x_B1E,))
        layer = nnx.merge(graphdef, jax.tree.map(gather_weight, parameters, specs))
        q, *new = layer.before_attention(x_B1E, cos, sin)
        keys, values = (
            lax.dynamic_update_slice(held, x.swapaxes(1, 2), (0, 0, place, 0))
            for held, x in zip((cache.keys[number], cache.values[number]), new, strict=True)
        )
        filled.append((keys, values))
        out_BHD = attend_to_cache(q[:, 0], keys, values, seen, SEQUENCE_AXES)
        x_B1E = layer.after_attention(x_B1E, out_BHD.astype(dtype)[:, None])
    hidden_BE = model.norm(x_B1E)[:, 0]
    weight_VE, (hidden_BE,) = serialize_collectives(
        model.lm_head_weight().astype(dtype), (hidden_BE,)
    )
    logits = token_logits(hidden_BE, gather_weight(weight_VE, lm_head_spec(spec, mesh, fsdp)))
    keys, values = zip(*filled, strict=True)
    return Cache(keys, values, cache.prompt_len, cache.count + 1), logits


def _places(layout: Layout, cache: Cache) -> tuple[Array, Array]:
    """Returns where a rank writes the new token, int32, and which keys it attends to, bool [S]."""
    rank = lax.axis_index(SEQUENCE_AXES)
    size = layout.block_size
    prompt = layout.block_ids(rank)[:, None] * size + jnp.arange(size, dtype=jnp.int32)
    prompt = prompt.reshape(-1)
    slots = jnp.arange(cache.keys[0].shape[2] - prompt.size, dtype=jnp.int32)
    new = (slots <= cache.count) & (rank == 0)
    seen = jnp.concatenate([prompt < cache.prompt_len, new])
    return prompt.size + cache.count, seen
