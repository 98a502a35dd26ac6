"""A model that runs layer by layer, so that only the sparse pattern has to be compiled again.

Everything around attention is compiled once. Attention, recall and the plan of the kernels are
compiled once for each kind and size of index, and only selection for each setting.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from mtraining_jax.models.fsdp import compute_weights
from mtraining_jax.models.huggingface.config import read_hf_config
from mtraining_jax.models.huggingface.read import load_hf
from mtraining_jax.models.label_scores import label_scores
from mtraining_jax.models.rope import YarnScaling
from mtraining_jax.models.rope.rotary import rope_tables
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.models.transformer import DecoderLayer, Transformer, graph_definition
from mtraining_jax.utils.errors import UserError

_LOSS_CHUNK = 4096  # tokens per chunk of logits

# (layer, q [1, S, Hq, D], k, v [1, S, Hk, D]) -> [1, S, Hq, D]
Attend = Callable[[int, Array, Array, Array], Array]


def read_model(folder: Path, seq_len: int, dtype: str) -> Transformer:
    """Reads a Hugging Face checkpoint; YaRN stretches its context if the sequence is longer.

    Args:
        folder: of the checkpoint.
        seq_len: S.
        dtype: that layers compute in.

    Raises:
        UserError: if the checkpoint cannot be read.
    """
    spec = read_hf_config(folder, dtype=dtype, remat="none")
    if spec.family in ("mistral", "gemma3_text"):
        raise UserError(f"{folder} is a {spec.family} model; use one without sliding windows")
    changed = ()
    context = spec.max_position_embeddings
    if seq_len > context:
        scaling = YarnScaling(factor=seq_len / context, original_max_position_embeddings=context)
        spec = dataclasses.replace(spec, rope_scaling=scaling, max_position_embeddings=seq_len)
        changed = ("rope_scaling", "max_position_embeddings")
    return nnx.merge(graph_definition(spec), load_hf(folder, spec, override=changed))


class SteppedModel:
    """Runs a model on one sequence at a time, with any attention.

    Attributes:
        spec: of the model.

    Args:
        model: on the default device.
        seq_len: S.
    """

    def __init__(self, model: Transformer, seq_len: int) -> None:
        self.spec: ModelSpec = model.spec
        self._embedding = model.embed_tokens.weight[...]
        self._head = model.lm_head_weight()
        graphdef, self._layers = nnx.split(model.layers)
        dtype, spec = jnp.dtype(self.spec.dtype), self.spec
        self._tables = jax.jit(lambda: rope_tables(jnp.arange(seq_len, dtype=jnp.int32), spec))()
        norm_graph, norm_state = nnx.split(model.norm)

        def layer(layers: nnx.State, number: Array) -> DecoderLayer:
            weights = compute_weights(jax.tree.map(lambda x: x[number], layers), dtype)
            return nnx.merge(graphdef, weights)

        self._embed = jax.jit(
            lambda table, tokens: jnp.take(table, tokens, axis=0)[None].astype(dtype)
        )
        self._before = jax.jit(
            lambda layers, number, x, cos, sin: layer(layers, number).before_attention(x, cos, sin)
        )
        self._after = jax.jit(
            lambda layers, number, x, out: layer(layers, number).after_attention(x, out)[0]
        )
        self._norm_state = norm_state
        self._losses = jax.jit(functools.partial(_losses, norm_graph))
        self._part_losses = jax.jit(functools.partial(_part_losses, norm_graph))

    def losses(self, tokens: np.ndarray, attend: Attend) -> Array:
        """Returns the loss on each token but the first, fp32 [S - 1] in nats.

        Args:
            tokens: integers [S].
            attend: causal attention of each layer.
        """
        tokens = jnp.asarray(tokens, jnp.int32)
        _, x, _ = collections.deque(self._run(tokens, attend), maxlen=1).pop()
        return self._losses(self._norm_state, x, self._head, tokens)

    def part_losses(
        self,
        tokens: Array,
        labels: Array,
        first: Array | int,
        attend: Callable[..., tuple[Array, Array]],
    ) -> tuple[Array, Array]:
        """Returns the losses on labels [n] of tokens [n], fp32 [n]; may be traced.

        `first` is the position of the first token. `attend` gets queries, keys and values, with
        the number of the layer as an array, and returns its output and a measurement; those of all
        layers are returned too.
        """
        count = tokens.shape[0]
        tables = [lax.dynamic_slice_in_dim(x, first, count, axis=1) for x in self._tables]

        def layer(x: Array, number: Array) -> tuple[Array, Array]:
            qkv = self._before(self._layers, number, x, *tables)
            out, measured = attend(number, *qkv)
            return self._after(self._layers, number, x, out), measured

        numbers = jnp.arange(self.spec.num_layers, dtype=jnp.int32)
        x, measured = lax.scan(layer, self._embed(self._embedding, tokens), numbers)
        return self._part_losses(self._norm_state, x, self._head, labels), measured

    def heads(self, tokens: np.ndarray, attend: Attend, layer: int) -> tuple[Array, Array, Array]:
        """Returns q, k and v of a layer; arguments as in `losses`."""
        run = self._run(jnp.asarray(tokens, jnp.int32), attend)
        return next(qkv for number, _, qkv in run if number == layer)

    def _run(self, tokens: Array, attend: Attend) -> Iterator[tuple[int, Array, tuple]]:
        """Yields the number of each layer, the residual stream after it, and its q, k and v."""
        x = self._embed(self._embedding, tokens)
        for number in range(self.spec.num_layers):
            at = jnp.int32(number)
            qkv = self._before(self._layers, at, x, *self._tables)
            x = self._after(self._layers, at, x, attend(number, *qkv))
            yield number, x, qkv


def _losses(graph: nnx.GraphDef, state: nnx.State, x: Array, head: Array, tokens: Array) -> Array:
    hidden = nnx.merge(graph, state)(x)
    # The last token has no label; a dummy keeps the chunks even, and its loss is dropped.
    labels = jnp.roll(tokens, -1)[None]
    return label_scores(hidden, head, labels, chunk_size=_LOSS_CHUNK).loss[0, :-1]


def _part_losses(
    graph: nnx.GraphDef, state: nnx.State, x: Array, head: Array, labels: Array
) -> Array:
    hidden = nnx.merge(graph, state)(x)
    return label_scores(hidden, head, labels[None], chunk_size=_LOSS_CHUNK).loss[0]
