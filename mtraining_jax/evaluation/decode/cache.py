"""The KV cache."""

import dataclasses
import functools
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.evaluation.decode.attention import CHUNK
from mtraining_jax.evaluation.engine.network import Network
from mtraining_jax.parallel.mesh import SEQUENCE_AXES

_LEAST_ROOM = 64

# [L, B, S, Hk, D] of a prompt, and [B, Hk, S, D] of one layer of a cache.
STACKED = P(None, None, SEQUENCE_AXES)
ONE_LAYER = P(None, None, SEQUENCE_AXES)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Rotated keys, and values, of a prompt and of new tokens; a pytree.

    Each rank holds its shard of the prompt, followed by room for T new tokens. Every rank writes
    new tokens, which is cheap, but only the first attends to them.

    Attributes:
        keys, values: per layer [B, Hk, W (S / W + T), D] in the compute dtype, tokens sharded over
            ('node', 'device'). Heads come before tokens, so each head's keys are contiguous. Layers
            are separate arrays, because the compiler would copy each layer out of a stacked array
            for every token.
        prompt_len: int32 scalar, without padding.
        count: int32 scalar, number of new tokens.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    prompt_len: Array
    count: Array

    @classmethod
    def specs(cls, layers: int) -> Self:
        return cls(*cast(Any, ((ONE_LAYER,) * layers, (ONE_LAYER,) * layers, P(), P())))


def room_for(new_tokens: int, local_tokens: int) -> int:
    """Returns how many new tokens to allocate: a power of two, so that programs can be reused.

    The cache of a long prompt stays divisible by `CHUNK`, for at most a 64th more memory.
    """
    share = 1 << max(local_tokens // 64, 1).bit_length() - 1
    return max(1 << (new_tokens - 1).bit_length(), min(share, CHUNK), _LEAST_ROOM)


def with_room(network: Network, stacked: Array, room: int) -> tuple[Array, ...]:
    """Splits keys or values of a prompt by layer, and adds room for T new tokens per rank.

    `stacked` [L, B, S, Hk, D] is deleted, as it takes as much memory as the result, for each layer
    [B, Hk, W (S / W + T), D].
    """
    layers = _with_room(network.mesh, room, stacked)
    stacked.delete()
    return layers


@functools.partial(jax.jit, static_argnums=(0, 1))
def _with_room(mesh: jax.sharding.Mesh, room: int, stacked: Array) -> tuple[Array, ...]:
    def pad_shard(stacked: Array) -> tuple[Array, ...]:
        padding = ((0, 0), (0, 0), (0, room), (0, 0))
        return tuple(jnp.pad(layer.swapaxes(1, 2), padding) for layer in stacked)

    return jax.shard_map(
        pad_shard,
        mesh=mesh,
        in_specs=STACKED,
        out_specs=(ONE_LAYER,) * stacked.shape[0],
        check_vma=False,
    )(stacked)


def of_prompt(
    network: Network, keys: tuple[Array, ...], values: tuple[Array, ...], prompt_len: Array
) -> Cache:
    """Builds the cache after the prefill, from the results of `with_room`."""
    everywhere = NamedSharding(network.mesh, P())
    return Cache(keys, values, prompt_len, jnp.zeros((), jnp.int32, device=everywhere))
