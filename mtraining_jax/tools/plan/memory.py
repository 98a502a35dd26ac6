"""Formulas for the memory of one device in a training step.

Temporary buffers are multiples of a layer's activations; all else is exact.
"""

import dataclasses
import math

from jax.sharding import AbstractMesh, AxisType

from mtraining_jax.config import Config
from mtraining_jax.models.parameters import LAYERS
from mtraining_jax.models.products import first_chunks
from mtraining_jax.models.sharding import lm_head_name
from mtraining_jax.models.spec import ModelSpec, layer_windows
from mtraining_jax.parallel.mesh import AXES
from mtraining_jax.reporting.flops import adapter_products, head_products, trained_spec
from mtraining_jax.tools.plan import pattern_costs
from mtraining_jax.training.memory_check import shard_bytes
from mtraining_jax.training.state import StateBuilder
from pallas_kernels.head_loop import LISTS, num_head_chunks
from pallas_kernels.index.bits import BYTES_AT_ONCE

# Arrays alive at the same time in XLA's schedule for an H200, 2026-11-21
# (docs/design/step-time-and-memory.md):
# [tokens, hidden_size] in a layer's backward pass, [chunk tokens, intermediate_size] in its MLP,
# and [tokens, hidden_size] around the output layer.
_WIDE_ARRAYS = 10
_MLP_ARRAYS = 6
_HEAD_ARRAYS = 4
# [rows, hidden_size] of a chunk, one row per expert of a token; compiled for an H200, 2026-11-26.
_EXPERT_ARRAYS = 1
# [tokens, num_heads * head_dim] per copy of the queries that a pattern makes (MoBA): with bf16, 5.8
# to 6.3 in XLA's buffer assignment of the attention gradient for a CPU
# (docs/design/step-time-and-memory.md).
_COPY_ARRAYS = 6
_LIST_ARRAYS = 5  # of up to BYTES_AT_ONCE, while work lists are built
# If heads are computed in parts: wide arrays, those of all parts together, those of norms of q and
# k, and those during the MLP (2026-11-26, benchmarks/results/memory-formulas-2026-11-25.md).
_WIDE_IN_PARTS, _WIDE_OF_PARTS, _WIDE_OF_NORMS, _WIDE_IN_MLP = 7.7, 4.5, 2, 8
_UPDATE_ARRAYS = 5  # of the head's size, while it is updated with moments from the host
_WIDE_OF_SUMS = 2  # of these for fp32 sums of dq over kernels; one device has none

_PINNED_RESERVE = 1.05  # of the formula for arrays that a step keeps in host memory
_OFFLOADS = "attention_offload", "full_offload"


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Bytes of the training state on one device."""

    frozen: int  # local shards of frozen parameters, matrices in the compute dtype
    parameters: int  # local shards of trained ones, fp32
    optimizer: int  # both moments, if they are on the device
    gradients: int  # of trainable parameters, fp32
    host: int  # host memory per device for any of these; in `Memory` also for activations


@dataclasses.dataclass(frozen=True)
class Memory(StateBytes):
    """Bytes on one device."""

    kept: int  # activations of all layers kept for the backward pass
    index: int  # sparse indices of all layers and the work lists of one
    workspace: int  # temporary buffers

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self)) - self.host


def planned_state(config: Config) -> StateBuilder:
    """The state of the run on its mesh, without devices."""
    mesh = AbstractMesh(config.mesh_shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return StateBuilder(config, mesh)


def state_bytes(config: Config) -> StateBytes:
    """Counts the training state, which depends on the model and on how it is sharded."""
    builder = planned_state(config)
    state = builder.abstract()
    trained, frozen = map(shard_bytes, builder.split(state.model))
    host = shard_bytes((state.opt_state, state.model), on_host=True)
    # Gradients, and their sums over micro-batches.
    copies = 1 if config.optimizer.accumulation_steps == 1 else 2
    host += copies * shard_bytes(builder.split(state.model)[0], on_host=True)
    optimizer = shard_bytes(state.opt_state)
    return StateBytes(frozen, trained, optimizer, gradients=trained, host=host)


def estimate_memory(config: Config, state: StateBytes | None = None) -> Memory:
    """Estimates the memory of one device in a step without compiling; `state` if it is known."""
    state = state_bytes(config) if state is None else state
    num_layers, gradients = config.model.num_layers, state.gradients
    index_layers = layer_windows(config.model).count(None)
    if config.model.remat in ("full", "full_offload"):
        index_layers = min(index_layers, 1)
    kept, index = num_layers * _kept(config), index_layers * index_bytes(config)
    index += _work_lists(config)
    # The loss comes before the layers' gradients. The update comes after activations; it keeps old
    # values until the new ones are known to be finite, but one layer at a time with offloading.
    head = 4 * head_products(config) if _trains_head(config) else 0
    shards = config.ranks if config.parallel.fsdp else 1
    head_update = _UPDATE_ARRAYS * head // shards
    update = {False: gradients + head, True: head, "all": head_update}[config.optimizer.offload]
    host = state.host + offloaded(config)
    return Memory(
        **dataclasses.asdict(state) | {"host": host},
        kept=kept,
        index=index,
        workspace=max(
            _layer(config), _loss(config) - gradients, update - kept - index, _list_building(config)
        ),
    )


def pinned_limit(config: Config) -> int | None:
    """GiB of pinned host memory that XLA may take for each GPU; None if nothing is offloaded.

    XLA's pool grows in blocks of powers of two: 73 GiB of activations would take 128 without a
    limit, which cuts the last block. Arrays of the state, which arrive one by one, need up to 3
    times their size in such blocks.
    """
    if not (whole := estimate_memory(config).host):
        return None
    state = planned_state(config).abstract()
    placed = shard_bytes((state.opt_state, state.model), on_host=True)
    kept = _PINNED_RESERVE * (whole - placed)
    return math.ceil((3 * placed + kept) / 2**30) + 4


def offloaded(config: Config) -> int:
    """Bytes of host memory per device for offloaded activations."""
    model, width = config.model, 0
    if model.remat in _OFFLOADS:
        width += model.hidden_size  # layer input
    if model.remat == "full_offload":
        width += model.num_heads * model.head_dim  # attention output
    index = index_bytes(config) if model.remat == "full_offload" else 0
    return model.num_layers * (config.local_tokens * width * dtype_bytes(config) + index)


def kept_mlp_tokens(config: Config) -> int:
    """Tokens per micro-batch and device with kept MLP products."""
    model = config.model
    return first_chunks(config.local_tokens, model.mlp_chunk_size, model.mlp_kept_chunks)


def kept_mlp_products(config: Config) -> int:
    """Bytes per layer that `model.mlp_kept_chunks` keeps."""
    return 2 * kept_mlp_tokens(config) * _mlp_width(config) * dtype_bytes(config)


def _mlp_width(config: Config) -> int:
    """Width of the MLP activations of a token: those of all its experts."""
    return config.model.intermediate_size * (config.model.num_experts_per_tok or 1)


def _kept(config: Config) -> int:
    model, tokens, size = config.model, config.local_tokens, dtype_bytes(config)
    queries = model.num_heads * model.head_dim
    kept = kept_mlp_products(config)
    if model.remat not in _OFFLOADS:
        kept += tokens * model.hidden_size * size  # layer input
    if model.remat not in ("full", "full_offload"):
        kept += tokens * queries * size  # attention output
    if model.remat != "full":
        kept += tokens * 4 * model.num_heads  # its fp32 logsumexp
    if model.remat in ("mlp", "none"):
        keys_and_values = 2 * model.num_kv_heads * model.head_dim
        # Includes the residual stream between attention and the MLP.
        kept += tokens * (queries + keys_and_values + model.hidden_size) * size
    if model.remat == "none":
        # Both norm outputs; gate, up, activated gate, and their product.
        kept += tokens * (2 * model.hidden_size + 4 * _mlp_width(config)) * size
    return kept


def index_bytes(config: Config) -> int:
    """Bytes of one layer's index on one device; indices `sharded_by_query` are sharded."""
    numbers, _ = _capacities(config)
    whole = 4 * config.local_rows * config.model.num_heads * numbers
    sharded = config.sparsity.pattern.sharded_by_query(config.data.has_documents)
    return whole // config.ranks if sharded else whole


def _work_lists(config: Config) -> int:
    """Bytes of further kernel inputs of one layer."""
    model, sparsity = config.model, config.sparsity
    _, columns = _capacities(config)
    blocks = config.local_tokens // sparsity.block_size
    # Keys and values of the columns, their fp32 gradients, and int32 per block and column while
    # keep bits are packed.
    gathered = 2 * columns * model.head_dim * (dtype_bytes(config) + 4)
    lists = config.local_rows * model.num_heads * gathered
    lists += 4 * blocks * model.num_heads * columns
    return lists + 4 * LISTS * model.num_heads * _block_pairs(config) // attention_parts(config)


def _list_building(config: Config) -> int:
    """Bytes while work lists of some heads are built, without the lists."""
    parts = attention_parts(config)
    size = 4 * config.model.num_heads * _block_pairs(config) // parts
    copied = size if parts > 1 and config.ranks > 1 else 0
    return copied + _LIST_ARRAYS * min(size, BYTES_AT_ONCE)


def _block_pairs(config: Config) -> int:
    """Pairs of local query block and key block; 0 if no lists are made of them."""
    sparsity = config.sparsity
    if not sparsity.pattern.sharded_by_query(config.data.has_documents):
        return 0
    blocks = config.local_tokens // sparsity.block_size
    return blocks * (config.data.seq_len // sparsity.block_size)


def attention_parts(config: Config) -> int:
    """In how many parts a device computes its heads."""
    model = config.model
    sizes = _ring_bytes(config), _block_pairs(config)
    return num_head_chunks(model.num_heads, model.num_kv_heads, *sizes)


def _capacities(config: Config) -> tuple[int, int]:
    """Capacity of one head's index: entries, and columns among them."""
    num_blocks = config.data.seq_len // config.sparsity.block_size
    return pattern_costs.capacities(config.sparsity.pattern, num_blocks, config.data.has_documents)


def _layer(config: Config) -> int:
    """Bytes at the peak of a layer's backward pass."""
    model, tokens, size = config.model, config.local_tokens, dtype_bytes(config)
    spec, queries = ModelSpec.from_config(model), model.num_heads * model.head_dim
    wide = tokens * max(model.hidden_size, queries) * size
    chunk = max(min(tokens, model.mlp_chunk_size), kept_mlp_tokens(config))
    if model.remat == "none":
        chunk = tokens
    mlp = _MLP_ARRAYS * chunk * _mlp_width(config) * size
    mlp += _EXPERT_ARRAYS * chunk * model.num_experts_per_tok * model.hidden_size * size
    # Gathered matrices, their gradients, and the sums of the MLP's gradients over chunks.
    products = {name: x.size for name, x in spec.layer.items() if "vector" not in x.axes}
    trains = trained_spec(config).trains
    trained = {name: n for name, n in products.items() if trains(LAYERS + name)}
    trained = adapter_products(config) or trained
    matrices = sum(products.values()) * size + sum(trained.values()) * 4
    if not model.num_experts:  # XLA keeps no others of experts (compiled as above)
        matrices += 2 * 4 * sum(n for name, n in trained.items() if name.startswith("mlp."))
    elif config.optimizer.offload == "all":
        matrices += 4 * sum(trained.values())  # their parameters
    num_blocks = config.data.seq_len // config.sparsity.block_size
    copies = pattern_costs.query_copies(config.sparsity.pattern, num_blocks)
    copied = _COPY_ARRAYS * copies * tokens * queries * size
    parts, ring = attention_parts(config), _ring_bytes(config)
    unused = _WIDE_OF_SUMS if config.ranks == 1 else 0
    if parts == 1:
        return (_WIDE_ARRAYS - unused) * wide + ring + mlp + matrices + copied
    arrays = _WIDE_IN_PARTS + (_WIDE_OF_PARTS - unused) / parts
    arrays += _WIDE_OF_NORMS if "self_attn.q_norm.weight" in spec.layer else 0
    attention = int(arrays * wide) + ring // parts + _list_building(config)
    return max(attention, _WIDE_IN_MLP * wide + mlp) + matrices + copied


def _ring_bytes(config: Config) -> int:
    """Bytes of keys and values from other devices, and of their fp32 gradients, of all heads."""
    model, parallel = config.model, config.parallel
    if config.ranks == 1:
        return 0
    shards = max(parallel.devices_per_node, 2) if parallel.ring == "gather" else 2
    per_token = 2 * model.num_kv_heads * model.head_dim * (dtype_bytes(config) + 4)
    return shards * config.local_tokens * per_token


def _loss(config: Config) -> int:
    """Bytes of the output layer, for one chunk of tokens."""
    model, size = config.model, dtype_bytes(config)
    chunk = min(config.loss.chunk_size, config.local_tokens)
    logits = chunk * model.vocab_size * (4 + size)
    hidden = _HEAD_ARRAYS * config.local_tokens * model.hidden_size * size
    # Weight in the compute dtype, and its fp32 gradient before and after a chunk.
    weight = size + 2 * 4 if _trains_head(config) else 0
    return logits + hidden + head_products(config) * weight


def _trains_head(config: Config) -> bool:
    name, parts = lm_head_name(ModelSpec.from_config(config.model)), config.optimizer.trainable
    return config.lora.spec is None and (not parts or any(part in name for part in parts))


def dtype_bytes(config: Config) -> int:
    """Bytes of a number in the compute dtype."""
    return 2 if config.model.dtype == "bfloat16" else 4
