"""The KV cache, and attention of one query over it."""

import functools
import math
from typing import NamedTuple, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mtraining_jax.evaluation.engine.network import Network
from mtraining_jax.evaluation.engine.passes import STACKED, Prompt
from mtraining_jax.parallel.mesh import SEQUENCE_AXES

# Tokens per product with values, if they divide the cache. A single product over a long cache would
# have so few results that most of a GPU would be idle.
CHUNK = 512
_MIN_ROOM = 64
# One layer, [B, Hk, S, D].
_ONE_LAYER = P(None, None, SEQUENCE_AXES)


class Cache(NamedTuple):
    """Rotated keys, and values, of a prompt and of new tokens.

    Each rank holds its shard of the prompt, followed by room for T new tokens. Every rank writes
    new tokens, which is cheap, but only the first attends to them. Heads come before tokens, so
    each head's keys are contiguous. Layers are separate arrays, because the compiler would copy
    each layer out of a stacked array for every token.
    """

    keys: tuple[Array, ...]  # per layer [B, Hk, W (S / W + T), D] in the compute dtype
    values: tuple[Array, ...]
    prompt_len: Array  # int32 scalar, without padding
    count: Array  # int32 scalar, number of new tokens

    @classmethod
    def specs(cls, layers: int) -> Self:
        of_layers = (_ONE_LAYER,) * layers
        return cast(Self, cls(of_layers, of_layers, P(), P()))  # pyright: ignore


def make_cache(network: Network, prompt: Prompt, prompt_len: int, new_tokens: int) -> Cache:
    """Builds the cache after the prefill, and deletes keys and values of the prompt."""
    room = room_for(new_tokens, prompt.keys.shape[2] // network.ranks)
    layers = []
    for stacked in (prompt.keys, prompt.values):
        layers.append(_with_room(network.mesh, room, stacked))
        stacked.delete()
    keys, values = layers
    count = jax.device_put(np.int32(prompt_len), network.replicated)
    return Cache(keys, values, count, jnp.zeros((), jnp.int32, device=network.replicated))


def room_for(new_tokens: int, local_tokens: int) -> int:
    """Returns how many new tokens to allocate: a power of two, so that programs can be reused."""
    # The cache of a long prompt stays divisible by CHUNK, for at most a 64th more memory.
    share = 1 << max(local_tokens // 64, 1).bit_length() - 1
    return max(1 << (new_tokens - 1).bit_length(), min(share, CHUNK), _MIN_ROOM)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _with_room(mesh: Mesh, room: int, stacked: Array) -> tuple[Array, ...]:
    """Splits [L, B, S, Hk, D] by layer, and adds room for T new tokens per rank."""

    def pad_shard(stacked: Array) -> tuple[Array, ...]:
        padding = ((0, 0), (0, 0), (0, room), (0, 0))
        return tuple(jnp.pad(layer.swapaxes(1, 2), padding) for layer in stacked)

    return jax.shard_map(
        pad_shard,
        mesh=mesh,
        in_specs=STACKED,
        out_specs=(_ONE_LAYER,) * stacked.shape[0],
        check_vma=False,
    )(stacked)


def attend_to_cache(
    q_BHD: Array, k_BHkSD: Array, v_BHkSD: Array, seen_S: Array, axis_names: tuple[str, ...]
) -> Array:
    """Softmax attention over the keys of all ranks, fp32 [B, Hq, D]; inside `jax.shard_map`.

    Queries are replicated, rotated and unscaled. `seen_S` says which keys of this rank to attend
    to; there is at least one over all ranks.
    """
    batch, heads, dim = q_BHD.shape
    kv_heads, tokens = k_BHkSD.shape[1:3]
    q = q_BHD.reshape(batch, kv_heads, -1, dim)
    exact = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    einsum = functools.partial(jnp.einsum, precision=exact, preferred_element_type=jnp.float32)
    logits = einsum("bhgd,bhsd->bhgs", q, k_BHkSD) / math.sqrt(dim)
    logits = jnp.where(seen_S, logits, -jnp.inf)
    peak = logits.max(-1)
    # A rank may have no key to attend to.
    weights = jnp.exp(logits - jnp.where(peak == -jnp.inf, 0.0, peak)[..., None])
    total = weights.sum(-1)
    size = math.gcd(tokens, CHUNK)
    weights = weights.astype(v_BHkSD.dtype).reshape(*weights.shape[:3], -1, size)
    values = v_BHkSD.reshape(batch, kv_heads, -1, size, dim)
    out = einsum("bhgcs,bhcsd->bhcgd", weights, values).sum(2)
    if lax.axis_size(axis_names) == 1:
        return (out / total[..., None]).reshape(batch, heads, dim)
    # One exchange per layer, limited by latency for so few numbers.
    own = jnp.concatenate([out, total[..., None], peak[..., None]], axis=-1)
    parts = lax.all_gather(own, axis_names)
    out, total, peak = parts[..., :dim], parts[..., dim], parts[..., dim + 1]
    share = jnp.exp(peak - peak.max(0))
    out = (out * share[..., None]).sum(0) / (total * share).sum(0)[..., None]
    return out.reshape(batch, heads, dim)
