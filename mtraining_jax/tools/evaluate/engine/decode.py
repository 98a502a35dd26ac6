"""Decoding with a KV cache: each step appends a token and samples the next one."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.models.fsdp import compute_weights, gather_weight
from mtraining_jax.models.products import dot32
from mtraining_jax.models.rope.rotary import rope_tables
from mtraining_jax.models.sharding import layer_specs, parameter_spec, state_shardings
from mtraining_jax.models.transformer import Transformer, graph_definition
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import SEQUENCE_AXES
from mtraining_jax.parallel.ordering import serialize_collectives
from mtraining_jax.patterns.base import NewTokens
from mtraining_jax.tools.evaluate.engine.network import Network
from mtraining_jax.tools.evaluate.engine.passes import STACKED, Prompt
from mtraining_jax.tools.evaluate.engine.sampling import NO_TOKEN, judge, next_token
from pallas_kernels.checks import BLOCK_SIZE
from pallas_kernels.decode import DecodeCall, combine, decode
from pallas_kernels.key_codes import KeyCodes, block_weights, selected_blocks

_STEPS = 8  # of a GPU, after which the host reads tokens; a CPU's are slow, and read one by one
_MOST_SPARE = 512  # tokens of room that are not asked for
# One layer, [B, Hk, S, D].
_ONE_LAYER = P(None, None, SEQUENCE_AXES)
_CODES = KeyCodes(*cast(Any, (_ONE_LAYER, P(), P())))


class Cache(NamedTuple):
    """Rotated keys, and values, of a prompt and of new tokens.

    Each rank holds its shard of the prompt, followed by room for T new tokens; both take whole
    blocks of 128. Every rank writes new tokens, which is cheap, but only the first attends to them.
    Heads come before tokens, so each head's keys are contiguous. Layers are separate arrays,
    because the compiler would copy each layer out of a stacked array for every token.
    """

    keys: tuple[Array, ...]  # per layer [B, Hk, W (S / W + T), D] in the compute dtype
    values: tuple[Array, ...]
    codes: tuple[KeyCodes | None, ...]  # of the keys, in layers where new tokens select
    prompt_len: Array  # int32 [B], without padding
    count: Array  # int32 scalar, number of new tokens of each sequence


class ScoredTokens(NamedTuple):
    """The tokens that T steps sampled or were given, as arrays of JAX or NumPy."""

    tokens: Any  # int32 [T, B]
    log_probs: Any  # fp32 [T, B]
    is_argmax: Any  # bool [T, B], whether each is the most likely one

    @classmethod
    def empty(cls, steps: int, batch: int) -> Self:
        """Arrays of NumPy with room for T steps."""
        return cls(*(np.zeros((steps, batch), kind) for kind in (np.int32, np.float32, np.bool_)))


class Decoding(NamedTuple):
    """All that a step changes."""

    cache: Cache
    token: Array  # int32 [B], which the cache lacks
    given: Array  # int32 [T, B], the tokens that follow; `NO_TOKEN` for those to be sampled
    scored: ScoredTokens  # of the steps so far, with room for T


def make_cache(network: Network, prompt: Prompt, prompt_len: Sequence[int], room: int) -> Cache:
    """Builds the cache after the prefill, with room for new tokens; deletes that of the prompt."""
    tokens, layers = prompt.keys.shape[2], []
    for stacked in (prompt.keys, prompt.values):
        layers.append(_with_room(network.mesh, room, stacked))
        stacked.delete()
    keys, values = layers
    lengths = jax.device_put(np.asarray(prompt_len, np.int32), network.replicated)
    count = jnp.zeros((), jnp.int32, device=network.replicated)
    layout, all_new = network.sequence_layout(tokens), np.ones(len(prompt_len), bool)
    codes = coded(network, layout, None, keys, lengths, count, all_new)
    return Cache(keys, values, codes, lengths, count)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _with_room(mesh: Mesh, room: int, stacked_LBSHkD: Array) -> tuple[Array, ...]:
    """Splits keys or values by layer, and adds room for T new tokens per rank."""

    def pad_shard(stacked: Array) -> tuple[Array, ...]:
        local = stacked.shape[2]
        padding = ((0, 0), (0, 0), (0, _whole_blocks(local) - local + room), (0, 0))
        return tuple(jnp.pad(layer.swapaxes(1, 2), padding) for layer in stacked)

    out_specs = (_ONE_LAYER,) * stacked_LBSHkD.shape[0]
    run = jax.shard_map(
        pad_shard, mesh=mesh, in_specs=STACKED, out_specs=out_specs, check_vma=False
    )
    return run(stacked_LBSHkD)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def coded(
    network: Network,
    layout: Layout,
    before: tuple[KeyCodes | None, ...] | None,
    keys: tuple[Array, ...],
    prompt_len: Array,
    count: Array,
    renewed_B: Array,
) -> tuple[KeyCodes | None, ...]:
    """Codes the keys of layers that select, around their mean in the prompt and new tokens.

    `before` are codes to keep in sequences that are not to be renewed, bool [B]; None if there are
    none. The other arguments are those of a `Cache`.
    """

    def code(
        before: KeyCodes | None, keys: Array, prompt_len: Array, count: Array, renewed_B: Array
    ) -> KeyCodes:
        cache = Cache((keys,), (), (), prompt_len, count - 1)  # the last token that it has
        seen_BS = _slots(layout, cache)[2]
        number = lax.psum(seen_BS.sum(1), SEQUENCE_AXES)[:, None, None, None]
        own = keys.astype(jnp.float32)

        def mean(values: Array) -> Array:
            total = jnp.where(seen_BS[:, None, :, None], values, 0).sum(2, keepdims=True)
            return lax.psum(total, SEQUENCE_AXES) / number

        middle = mean(own)
        found = KeyCodes.of(keys, middle, jnp.sqrt(mean((own - middle) ** 2)))
        if before is None:
            return found
        renewed = renewed_B[:, None, None, None]
        return jax.tree.map(lambda x, old: jnp.where(renewed, x, old), found, before)

    old_specs = None if before is None else _CODES
    run = jax.shard_map(
        code,
        mesh=network.mesh,
        in_specs=(old_specs, _ONE_LAYER, P(), P(), P()),
        out_specs=_CODES,
        check_vma=False,
    )
    old = (None,) * len(keys) if before is None else before
    return tuple(
        run(codes, layer, prompt_len, count, renewed_B) if network.selects(window) else None
        for codes, layer, window in zip(old, keys, network.spec.windows, strict=True)
    )


def renewals(lengths: Sequence[int], steps: int, dense_below: int) -> dict[int, np.ndarray]:
    """Returns the sequences to renew the codes of, bool [B], by the step that comes next.

    That is once a sequence has twice the keys that its codes have the range of, since RoPE rotates
    later keys out of it, and tokens select.
    """
    found: dict[int, np.ndarray] = {}
    for number, length in enumerate(lengths):
        coded = length
        while (coded := max(2 * coded, dense_below - 1)) - length < steps:
            found.setdefault(coded - length, np.zeros(len(lengths), bool))[number] = True
    return found


def renew_codes(network: Network, layout: Layout, renewed_B: np.ndarray, now: Decoding) -> Decoding:
    """Codes the keys of some sequences again, see `renewals`."""
    cache = now.cache
    arrays = cache.codes, cache.keys, cache.prompt_len, cache.count
    return now._replace(cache=cache._replace(codes=coded(network, layout, *arrays, renewed_B)))


def room_for(new_tokens: int, local_tokens: int) -> int:
    """Returns how many new tokens to allocate, so that programs can be reused.

    That is a power of two of at least 128, and more for long prompts: up to a 64th of them.
    """
    spare = 1 << max(local_tokens // 64, 1).bit_length() - 1
    return max(1 << (new_tokens - 1).bit_length(), min(spare, _MOST_SPARE), BLOCK_SIZE)


def _whole_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE


def make_decoding(
    network: Network,
    prompt: Prompt,
    prompt_len: Sequence[int],
    token: Array,
    given: np.ndarray,
    new_tokens: int,
) -> Decoding:
    """Prepares decoding from a token int32 [B], and tokens int32 [n, B] that follow it."""
    room = room_for(new_tokens, prompt.keys.shape[2] // network.ranks)
    following = np.full((room, len(token)), NO_TOKEN, np.int32)
    following[: len(given)] = given
    empty = ScoredTokens.empty(room, len(token))
    arrays = jax.device_put((following, empty), network.replicated)
    cache = make_cache(network, prompt, prompt_len, room)
    return Decoding(cache, jnp.copy(token), *arrays)


def make_step(network: Network, layout: Layout, length: int, kind: str) -> Any:
    """Builds a program that reads one token, and samples or scores the next one.

    It attends to all earlier tokens, or to the blocks that `Network.new_tokens` selects. Every rank
    computes the full layer, but attends only to its own shard of the prompt; ranks exchange one
    output per head. The program takes the state, a `Decoding` with room (donated), and temperature,
    top_p and seed of `next_token`; it returns the `Decoding` after the step.
    """
    mesh, one_layer = network.mesh, (_ONE_LAYER,) * network.spec.num_layers
    codes = tuple(_CODES if network.selects(window) else None for window in network.spec.windows)
    specs = Cache(*cast(Any, (one_layer, one_layer, codes, P(), P())))

    def step(
        state: nnx.State, before: Decoding, temperature: Array, top_p: Array, seed: Array
    ) -> Decoding:
        shardings = state_shardings(state, network.spec.parameters, mesh, network.fsdp)
        run = jax.shard_map(
            functools.partial(_step_on_shard, network, layout, length),
            mesh=mesh,
            in_specs=(jax.tree.map(lambda x: x.spec, shardings), specs, P()),
            out_specs=(specs, P()),
            check_vma=False,
        )
        number = before.cache.count
        cache, logits = run(state, before.cache, before.token)
        # The first token was sampled from the logits of the prompt.
        sampled = next_token(logits, kind, temperature, top_p, seed, cache.count)
        given = lax.dynamic_index_in_dim(before.given, number, keepdims=False)
        token = jnp.where(given == NO_TOKEN, sampled, given)
        scored = jax.tree.map(
            lambda x, own: lax.dynamic_update_index_in_dim(x, own, number, 0),
            before.scored,
            ScoredTokens(token, *judge(logits, token)),
        )
        return Decoding(cache, token, before.given, scored)

    out_specs = Decoding(specs, *cast(Any, (P(), P(), ScoredTokens(*cast(Any, (P(),) * 3)))))
    out_shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs)
    return jax.jit(step, donate_argnums=1, out_shardings=out_shardings)


def steps_at_once(network: Network) -> int:
    """Steps that are started together."""
    return 1 if network.mesh.devices.flat[0].platform == "cpu" else _STEPS


def run_steps(
    step: Callable[[Decoding], Decoding],
    now: Decoding,
    steps: int,
    at_once: int,
    before_step: Mapping[int, Callable[[Decoding], Decoding]],
) -> Iterator[ScoredTokens]:
    """Takes at least `steps` steps, and yields their tokens, NumPy arrays of `at_once` steps.

    `before_step` has what else to do before a step, by its number. The devices compute the next
    item meanwhile. All arrays are used again, so that every step has the same addresses: if one
    changed, CUDA would load the graph of a step again, which takes longer than the step of a small
    model.
    """
    empty = ScoredTokens.empty(at_once, now.given.shape[1])
    before, spare = jax.device_put((empty, empty), now.token.sharding)
    for number in range(-(-steps // at_once)):
        for i in range(number * at_once, (number + 1) * at_once):
            now = step(before_step[i](now) if i in before_step else now)
        before, spare = _last_steps(now.scored, now.cache.count, spare), before
        if number:
            yield jax.device_get(spare)
    yield jax.device_get(before)


@functools.partial(jax.jit, donate_argnums=2, keep_unused=True)
def _last_steps(found: ScoredTokens, count: Array, spare: ScoredTokens) -> ScoredTokens:
    """Copies the last steps into the memory of `spare`."""

    def copy(x: Array, to: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, count - len(to), len(to))

    return jax.tree.map(copy, found, spare)


def _step_on_shard(
    network: Network, layout: Layout, length: int, state: nnx.State, cache: Cache, token_B: Array
) -> tuple[Cache, Array]:
    spec, mesh, fsdp = network.spec, network.mesh, network.fsdp
    dtype = jnp.dtype(spec.dtype)
    one_token = dataclasses.replace(spec, remat="none", mlp_kept_chunks=0)
    model: Transformer = nnx.merge(graph_definition(one_token), state)
    position_B1 = (cache.prompt_len + cache.count)[:, None]
    windows = dict.fromkeys(spec.windows)
    rotations = {
        window: rope_tables(position_B1, spec.in_window(window), length) for window in windows
    }
    slot, position_BS, seen_BS = _slots(layout, cache)
    distance_BS = position_B1 - position_BS
    seen = {x: _listed(seen_BS if x is None else seen_BS & (distance_BS < x)) for x in windows}
    choice = None
    if network.new_tokens is not None:
        choice = _Choice.of(network.new_tokens, position_BS, distance_BS, seen_BS)
    embedding_spec = parameter_spec(spec.parameters["embed_tokens.weight"], mesh, fsdp)
    table_VE = gather_weight(model.embed_tokens.weight[...], embedding_spec)
    x_B1E = jnp.take(table_VE, token_B, axis=0).astype(dtype)[:, None]
    x_B1E = model.scale_embedding(x_B1E)
    graphdef, layers = nnx.split(model.layers)
    specs = layer_specs(layers, spec.parameters, mesh, fsdp)
    filled: list[tuple[Array, Array, KeyCodes | None]] = []
    # Unrolled: in a loop, the compiler copies each layer's weights and keys before it reads them.
    for number, window in enumerate(spec.windows):
        parameters = jax.tree.map(lambda x, number=number: x[number], layers)
        parameters = compute_weights(parameters, dtype)
        parameters, (x_B1E,) = serialize_collectives(parameters, (x_B1E,))
        layer = nnx.merge(graphdef, jax.tree.map(gather_weight, parameters, specs))
        q, *new = layer.before_attention(x_B1E, *rotations[window])
        keys, values = (
            lax.dynamic_update_slice(held, x.swapaxes(1, 2), (0, 0, slot, 0))
            for held, x in zip((cache.keys[number], cache.values[number]), new, strict=True)
        )
        blocks, counts, limits = seen[window]
        scale, codes = q.shape[-1] ** -0.5, cache.codes[number]
        if codes is not None and choice is not None:
            code = codes.code(new[0].swapaxes(1, 2))
            updated = lax.dynamic_update_slice(codes.codes, code, (0, 0, slot, 0))
            codes = codes._replace(codes=updated)
            weights, totals = block_weights(q[:, 0], codes, limits, scale, network.backend)
            blocks, counts = choice.select(weights, totals, q[:, 0], network.backend)
        filled.append((keys, values, codes))
        sinks = layer.self_attn.sinks
        call = DecodeCall(q[:, 0], keys, values, blocks, counts, limits, scale)
        out_BHD = _attend_to_cache(call, None if sinks is None else sinks[...], network.backend)
        x_B1E, _ = layer.after_attention(x_B1E, out_BHD.astype(dtype)[:, None])
    hidden_BE = model.norm(x_B1E)[:, 0]
    weight_VE, (hidden_BE,) = serialize_collectives(
        model.lm_head_weight().astype(dtype), (hidden_BE,)
    )
    logits = dot32("be,ve->bv", hidden_BE, gather_weight(weight_VE, network.lm_head_spec))
    keys, values, codes = zip(*filled, strict=True)
    return Cache(keys, values, codes, cache.prompt_len, cache.count + 1), logits


def _slots(layout: Layout, cache: Cache) -> tuple[Array, Array, Array]:
    """Returns where a rank writes the new token, and of each slot the position and if it is seen.

    These are int32, int32 [B, S'] and bool [B, S'], for the S' tokens that the rank has room for.
    """
    rank = lax.axis_index(SEQUENCE_AXES)
    size = layout.block_size
    # The blocks of a rank ascend, so what is seen of a block is a range.
    prompt = layout.block_ids(rank)[:, None] * size + jnp.arange(size, dtype=jnp.int32)
    prompt = prompt.reshape(-1)
    start = _whole_blocks(prompt.size)
    prompt = jnp.pad(prompt, (0, start - prompt.size), constant_values=jnp.iinfo(jnp.int32).max)
    slots = jnp.arange(cache.keys[0].shape[2] - start, dtype=jnp.int32)
    end_B1 = cache.prompt_len[:, None]
    new = (slots <= cache.count) & (rank == 0)
    seen = jnp.concatenate([prompt < end_B1, jnp.broadcast_to(new, (len(end_B1), len(slots)))], 1)
    position = jnp.broadcast_to(prompt, (len(end_B1), start))
    return start + cache.count, jnp.concatenate([position, end_B1 + slots], 1), seen


class _Choice(NamedTuple):
    """What the layers of a step have in common when they select blocks."""

    forced: Array  # bool [B, NB], blocks that are selected in any case
    least: Array  # fp32 [B], the mass of other blocks

    @classmethod
    def of(cls, new: NewTokens, position_BS: Array, distance_BS: Array, seen_BS: Array) -> Self:
        length_BS = position_BS + distance_BS + 1  # of the sequence, for all slots
        forced = (position_BS < new.first_tokens) | (distance_BS < new.last_tokens)
        forced |= length_BS < new.dense_below
        forced = (forced & seen_BS).reshape(len(seen_BS), -1, BLOCK_SIZE).any(2)
        blocks = -(-length_BS[:, 0] // BLOCK_SIZE)
        return cls(forced, jnp.maximum(new.share / blocks, new.least_mass))

    def select(
        self, weights: Array, totals: Array, q: Array, backend: str | None
    ) -> tuple[Array, Array]:
        """Selects by `block_weights` of this rank: `blocks` and `counts` of `DecodeCall`."""
        totals = lax.all_gather(totals, SEQUENCE_AXES, axis=2, tiled=True)
        return selected_blocks(weights, totals, q, self.forced, self.least, backend)


def _listed(seen_BS: Array) -> tuple[Array, Array, Array]:
    """Lists the blocks that have seen keys, for all heads."""
    seen = seen_BS.reshape(len(seen_BS), -1, BLOCK_SIZE)
    first, some = jnp.argmax(seen, axis=2), seen.any(2)
    blocks = jnp.argsort(~some, axis=1, stable=True)
    limits = jnp.stack([first, first + seen.sum(2)], axis=2)
    lists = blocks[:, None], some.sum(1)[:, None], limits
    return cast(Any, tuple(x.astype(jnp.int32) for x in lists))


def _attend_to_cache(call: DecodeCall, sinks_H: Array | None, backend: str | None) -> Array:
    """Softmax attention over those keys of all ranks that are seen, fp32 [B, Hq, D].

    Queries are replicated; at least one key is seen by some rank.
    """
    out, lse = decode(call, backend)
    if lax.axis_size(SEQUENCE_AXES) > 1:
        # One exchange per layer, limited by latency for so few numbers.
        parts = lax.all_gather(jnp.concatenate([out, lse[..., None]], axis=-1), SEQUENCE_AXES)
        out, lse = combine(parts[..., :-1], parts[..., -1], axis=0)
    return out if sinks_H is None else out * jax.nn.sigmoid(lse - sinks_H)[..., None]
