"""The keys and values that a token to come attends to."""

import dataclasses
import functools
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.evaluation.decode.attention import CHUNK
from mtraining_jax.evaluation.network import Network
from mtraining_jax.parallel.mesh import SEQUENCE_AXES

_LEAST_ROOM = 64

# [L, B, S, Hk, D] of a prompt, and [B, Hk, S, D] of one layer of a cache.
STACKED = P(None, None, SEQUENCE_AXES)
ONE_LAYER = P(None, None, SEQUENCE_AXES)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys, rotated, and values of a prompt and of the tokens behind it; a pytree.

    Each rank holds its stripes of the prompt, and behind them room for T new tokens. Every rank
    writes these, which costs little, and only the first attends to them.

    Attributes:
        keys, values: of each layer [B, Hk, W (S / W + T), D] in the compute dtype, tokens spread
            over ('node', 'device'). Heads lie before tokens, so that a step reads each head's
            keys one after another. A step reads each layer by itself: from one array for all the
            compiler would copy them first, for every token again.
        prompt_len: int32 scalar, tokens of the prompt; those behind are padding.
        count: int32 scalar, new tokens.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    prompt_len: Array
    count: Array

    @classmethod
    def specs(cls, layers: int) -> Self:
        """How the arrays lie on a mesh: a `Cache` of `PartitionSpec`."""
        return cls((ONE_LAYER,) * layers, (ONE_LAYER,) * layers, P(), P())


def room_for(new_tokens: int, local_tokens: int) -> int:
    """How many new tokens to make room for: a power of two, so that few programs serve many.

    Args:
        new_tokens: how many there will be at most.
        local_tokens: of the prompt, on one rank. A long cache is kept divisible by `CHUNK`, which
            costs at most a 64th of it.
    """
    share = 1 << max(local_tokens // 64, 1).bit_length() - 1
    return max(1 << (new_tokens - 1).bit_length(), min(share, CHUNK), _LEAST_ROOM)


def with_room(network: Network, stacked: Array, room: int) -> tuple[Array, ...]:
    """Keys or values of a prompt, by layer and with room for new tokens.

    Args:
        network: the model.
        stacked: [L, B, S, Hk, D], as it lies after the prompt has been read. Its buffer is given
            up, as it takes as much memory as the result.
        room: T.

    Returns:
        For each layer [B, Hk, W (S / W + T), D].
    """
    layers = _with_room(network.mesh, room, stacked)
    stacked.delete()
    return layers


@functools.partial(jax.jit, static_argnums=(0, 1))
def _with_room(mesh: jax.sharding.Mesh, room: int, stacked: Array) -> tuple[Array, ...]:
    def local(stacked: Array) -> tuple[Array, ...]:
        padding = ((0, 0), (0, 0), (0, room), (0, 0))
        return tuple(jnp.pad(layer.swapaxes(1, 2), padding) for layer in stacked)

    return jax.shard_map(
        local, mesh=mesh, in_specs=STACKED, out_specs=(ONE_LAYER,) * stacked.shape[0],
        check_vma=False,
    )(stacked)  # fmt: skip


def of_prompt(
    network: Network, keys: tuple[Array, ...], values: tuple[Array, ...], prompt_len: Array
) -> Cache:
    """The cache when only the prompt has been read.

    Args:
        network: the model.
        keys, values: of `with_room`.
        prompt_len: int32 scalar.
    """
    everywhere = NamedSharding(network.mesh, P())
    return Cache(keys, values, prompt_len, jnp.zeros((), jnp.int32, device=everywhere))
