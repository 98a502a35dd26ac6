"""Formulas for the memory of one device in a training step.

Temporary buffers are estimated as multiples of a layer's activations, by the number of arrays that
XLA keeps alive at the peak of the backward pass (see `_layer`); all else is exact.
"""

import dataclasses
import math

import jax
from jax.sharding import AbstractMesh, AxisType

from mtraining_jax.config import Config
from mtraining_jax.models.chunks import first_chunks
from mtraining_jax.models.families import family_of
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.parallel.mesh import AXES
from mtraining_jax.training.state import StateBuilder

# Arrays alive at the same time in XLA's schedule for an H200, 2026-11-21
# (docs/design/step-time-and-memory.md):
# [tokens, hidden_size] in a layer's backward pass, [chunk tokens, intermediate_size] in its MLP,
# and [tokens, hidden_size] around the output layer.
_WIDE_ARRAYS = 13
_MLP_ARRAYS = 6
_HEAD_ARRAYS = 4
# [tokens, num_heads * head_dim] per copy of the queries that a pattern makes (MoBA): with bf16, 5.8
# to 6.3 in XLA's buffer assignment of the attention gradient for a CPU
# (docs/design/step-time-and-memory.md).
_COPY_ARRAYS = 6


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        parameters: local shards, fp32.
        optimizer: both moments.
        gradients: gradients of trainable parameters, fp32.
        kept: activations of all layers kept for the backward pass.
        index: sparse indices of all layers and the work lists of one.
        workspace: temporary buffers.
    """

    parameters: int
    optimizer: int
    gradients: int
    kept: int
    index: int
    workspace: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))

    def with_total(self, total: int) -> "Memory":
        """Adjusts the workspace to a given total."""
        rest = self.total - self.workspace
        return dataclasses.replace(self, workspace=max(0, total - rest))


def abstract_mesh(config: Config) -> AbstractMesh:
    """The mesh of the run without devices."""
    return AbstractMesh(config.mesh_shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def estimate_memory(config: Config) -> Memory:
    """Estimates the memory of one device in a step without compiling."""
    builder = StateBuilder(config, abstract_mesh(config))
    state = builder.abstract()
    trained, _ = builder.split(state.parameters)
    gradients = _bytes(trained)
    kept, index = _kept(config)
    workspace = max(_layer(config), _loss(config), _update(config, gradients))
    return Memory(
        parameters=_bytes(state.parameters),
        optimizer=_bytes(state.opt_state),
        gradients=gradients,
        kept=kept,
        index=index,
        workspace=workspace,
    )


def offloaded(config: Config) -> int:
    """Bytes of host memory per device for offloaded activations."""
    if config.model.remat != "attention_offload":
        return 0
    layer = config.local_tokens * config.model.hidden_size * _dtype_bytes(config)
    return config.model.num_layers * layer


def count_parameters(config: Config) -> tuple[int, int]:
    """Number of all and of trainable parameters."""
    builder = StateBuilder(config, abstract_mesh(config))
    parameters = builder.abstract().parameters
    sizes = {name: math.prod(x.shape) for name, x in parameters.items()}
    return sum(sizes.values()), sum(sizes[name] for name in builder.trainable)


def kept_mlp_tokens(config: Config) -> int:
    """Tokens per micro-batch and device with kept MLP products."""
    model = config.model
    return first_chunks(config.local_tokens, model.mlp_chunk_size, model.mlp_kept_chunks)


def kept_mlp_products(config: Config) -> int:
    """Bytes per layer that `model.mlp_kept_chunks` keeps."""
    return 2 * kept_mlp_tokens(config) * config.model.intermediate_size * _dtype_bytes(config)


def _kept(config: Config) -> tuple[int, int]:
    """Bytes kept for the backward pass: activations and indices."""
    model, tokens, size = config.model, config.local_tokens, _dtype_bytes(config)
    queries = model.num_heads * model.head_dim
    layer = 0
    if model.remat != "attention_offload":
        layer += tokens * model.hidden_size * size  # layer input
    if model.remat != "full":
        # Attention output and its fp32 logsumexp.
        layer += tokens * (queries * size + 4 * model.num_heads)
    if model.remat in ("mlp", "none"):
        keys_and_values = 2 * model.num_kv_heads * model.head_dim
        # Includes the residual stream between attention and the MLP.
        layer += tokens * (queries + keys_and_values + model.hidden_size) * size
    layer += kept_mlp_products(config)
    if model.remat == "none":
        # Both norm outputs; gate, up, activated gate, and their product.
        layer += tokens * (2 * model.hidden_size + 4 * model.intermediate_size) * size
    index_layers = 1 if model.remat == "full" else model.num_layers
    return model.num_layers * layer, index_layers * index_bytes(config) + _work_lists(config)


def index_bytes(config: Config) -> int:
    """Bytes of one layer's index on one device; indices `by_rows` are sharded."""
    numbers, _ = _capacities(config)
    whole = 4 * config.local_rows * config.model.num_heads * numbers
    return whole // config.ranks if _row_sharded(config) else whole


def _work_lists(config: Config) -> int:
    """Bytes of further kernel inputs of one layer."""
    _, columns = _capacities(config)
    model, blocks = config.model, config.local_tokens // config.sparsity.block_size
    # Keys and values of the columns, their fp32 gradients, and int32 per block and column while
    # keep bits are packed.
    gathered = 2 * columns * model.head_dim * (_dtype_bytes(config) + 4)
    lists = 0
    if _row_sharded(config):
        # int32 per pair of local query block and key block of the node, and the transpose.
        keys = config.data.seq_len // config.parallel.nodes // config.sparsity.block_size
        lists = 2 * 4 * blocks * model.num_heads * keys
    columns_of_layer = config.local_rows * model.num_heads * gathered
    return columns_of_layer + 4 * blocks * model.num_heads * columns + lists


def _capacities(config: Config) -> tuple[int, int]:
    """Capacity of one head's index: entries, and columns among them."""
    num_blocks = config.data.seq_len // config.sparsity.block_size
    return config.sparsity.settings.capacities(num_blocks, config.data.has_documents)


def _row_sharded(config: Config) -> bool:
    return config.sparsity.settings.row_sharded(config.data.has_documents)


def _layer(config: Config) -> int:
    """Bytes at the peak of a layer's backward pass."""
    model, tokens, size = config.model, config.local_tokens, _dtype_bytes(config)
    wide = _WIDE_ARRAYS * tokens * max(model.hidden_size, model.num_heads * model.head_dim) * size
    chunk = max(min(tokens, model.mlp_chunk_size), kept_mlp_tokens(config))
    if model.remat == "none":
        chunk = tokens
    mlp = _MLP_ARRAYS * chunk * model.intermediate_size * size
    return wide + mlp + _layer_parameters(config) + _query_copies(config)


def _query_copies(config: Config) -> int:
    """Bytes of query copies and their intermediate results in one layer."""
    model = config.model
    num_blocks = config.data.seq_len // config.sparsity.block_size
    copies = config.sparsity.settings.query_copies(num_blocks)
    queries = config.local_tokens * model.num_heads * model.head_dim * _dtype_bytes(config)
    return _COPY_ARRAYS * copies * queries


def _loss(config: Config) -> int:
    """Bytes of the output layer, for one chunk of tokens."""
    model, size = config.model, _dtype_bytes(config)
    chunk = min(config.loss.chunk_size, config.local_tokens)
    logits = chunk * model.vocab_size * (4 + size)
    hidden = _HEAD_ARRAYS * config.local_tokens * model.hidden_size * size
    # Weight in the compute dtype, and its fp32 gradient before and after a chunk.
    return logits + hidden + _head(config) * (size + 2 * 4)


def _update(config: Config, gradients: int) -> int:
    """Bytes of the update, which keeps old values until the new ones are known to be finite."""
    return gradients + 4 * _head(config)


def _layer_parameters(config: Config) -> int:
    """Bytes of one layer's gathered matrices, their gradients and the MLP's sums over chunks."""
    products = _products(config)
    mlp = sum(size for name, size in products.items() if name.startswith("mlp."))
    return 2 * sum(products.values()) * _dtype_bytes(config) + 2 * mlp * 4


def _products(config: Config) -> dict[str, int]:
    """Number of entries of each matrix of a layer."""
    spec = ModelSpec.from_config(config.model)
    return family_of(spec.family).layer_products(spec)


def _head(config: Config) -> int:
    """Number of entries of the output matrix."""
    spec = ModelSpec.from_config(config.model)
    return family_of(spec.family).head_products(spec)


def _dtype_bytes(config: Config) -> int:
    return 2 if config.model.dtype == "bfloat16" else 4


def _bytes(tree: object) -> int:
    """Bytes of one device's shards."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
